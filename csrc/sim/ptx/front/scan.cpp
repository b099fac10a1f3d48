#include "front/scan.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

namespace ptx {

namespace {

bool word_character(char c) { return std::isalnum(static_cast<unsigned char>(c)) || strchr("_$%.", c) != nullptr; }

std::string without_comments(const std::string& text) {
  std::string out = text;
  bool string = false;
  for (size_t i = 0; i < out.size(); i++) {
    if (out[i] == '"') string = !string;
    if (string || out[i] != '/' || i + 1 == out.size()) continue;
    if (out[i + 1] == '/') {
      while (i < out.size() && out[i] != '\n') out[i++] = ' ';
    } else if (out[i + 1] == '*') {
      const size_t end = std::min(out.find("*/", i + 2), out.size() - 2) + 2;
      for (; i < end; i++)
        if (out[i] != '\n') out[i] = ' ';
      i--;
    }
  }
  return out;
}

}  // namespace

Scanner::Scanner(const std::string& text) : text_(without_comments(text)) {}

void Scanner::fail(const std::string& what) const { throw Error("line " + std::to_string(line_) + ": " + what); }

void Scanner::advance() {
  if (text_[at_] == '\n') line_++;
  at_++;
}

bool Scanner::at_end() {
  while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) advance();
  return at_ == text_.size();
}

char Scanner::peek() { return at_end() ? '\0' : text_[at_]; }

bool Scanner::take(char c) {
  if (peek() != c) return false;
  advance();
  return true;
}

void Scanner::expect(char c, const char* where) {
  if (!take(c)) fail(std::string("expected '") + c + "' " + where + ", found '" + peek() + "'");
}

std::string Scanner::word() {
  at_end();
  const size_t begin = at_;
  while (at_ < text_.size()) {
    if (word_character(text_[at_])) at_++;
    else if (text_.compare(at_, 2, "::") == 0) at_ += 2;
    else break;
  }
  return text_.substr(begin, at_ - begin);
}

bool Scanner::take_label(std::string& name) {
  at_end();
  size_t end = at_;
  while (end < text_.size() && word_character(text_[end])) end++;
  const size_t after = end;
  while (end < text_.size() && (text_[end] == ' ' || text_[end] == '\t')) end++;
  if (after == at_ || text_.compare(end, 1, ":") != 0 || text_.compare(end, 2, "::") == 0 || text_[at_] == '.')
    return false;
  name = text_.substr(at_, after - at_);
  at_ = end + 1;
  return true;
}

std::string Scanner::until(const char* ends) {
  const size_t begin = at_;
  int depth = 0;
  bool string = false;
  for (; at_ < text_.size(); advance()) {
    const char c = text_[at_];
    if (c == '"') string = !string;
    if (string) continue;
    if (depth == 0 && strchr(ends, c) != nullptr) {
      const std::string out = text_.substr(begin, at_ - begin);
      advance();
      return trim(out);
    }
    if (strchr("([{", c) != nullptr) depth++;
    if (strchr(")]}", c) != nullptr && --depth < 0) fail("unbalanced '" + std::string(1, c) + "'");
  }
  fail("the text ends inside a statement: '" + trim(text_.substr(begin, 60)) + "'");
}

std::string Scanner::rest_of_line() {
  const size_t begin = at_;
  while (at_ < text_.size() && text_[at_] != '\n') at_++;
  return trim(text_.substr(begin, at_ - begin));
}

std::string Scanner::quoted() {
  expect('"', "to begin a string");
  const size_t begin = at_;
  while (at_ < text_.size() && text_[at_] != '"') advance();
  const std::string out = text_.substr(begin, at_ - begin);
  expect('"', "to end a string");
  return out;
}

std::string trim(const std::string& s) {
  const char* blank = " \t\r\n";
  const size_t begin = s.find_first_not_of(blank);
  return begin == std::string::npos ? "" : s.substr(begin, s.find_last_not_of(blank) - begin + 1);
}

std::vector<std::string> split_top(const std::string& s, char at) {
  std::vector<std::string> out;
  int depth = 0;
  bool string = false;
  size_t begin = 0;
  for (size_t i = 0; i < s.size(); i++) {
    if (s[i] == '"') string = !string;
    if (string) continue;
    if (strchr("([{", s[i]) != nullptr) depth++;
    if (strchr(")]}", s[i]) != nullptr) depth--;
    if (s[i] == at && depth == 0) {
      out.push_back(trim(s.substr(begin, i - begin)));
      begin = i + 1;
    }
  }
  const std::string last = trim(s.substr(begin));
  if (!last.empty() || !out.empty()) out.push_back(last);
  return out;
}

// PTX ISA 4.4 "Identifiers".
bool is_identifier(const std::string& s) {
  if (s.empty() || std::isdigit(static_cast<unsigned char>(s[0]))) return false;
  if (strchr("_$%", s[0]) != nullptr && s.size() == 1) return false;
  for (char c : s)
    if (!std::isalnum(static_cast<unsigned char>(c)) && strchr("_$%.", c) == nullptr) return false;
  return s[0] != '.';
}

bool parse_integer(const std::string& text, int64_t& out) {
  std::string s = text;
  const bool negative = !s.empty() && s[0] == '-';
  if (negative) s.erase(0, 1);
  if (!s.empty() && s.back() == 'U') s.pop_back();
  if (s.empty() || !std::isdigit(static_cast<unsigned char>(s[0]))) return false;
  int base = 10;
  if (s.size() > 1 && s[0] == '0') {
    base = s[1] == 'x' || s[1] == 'X' ? 16 : s[1] == 'b' || s[1] == 'B' ? 2 : 8;
    if (base != 8) s.erase(0, 2);
  }
  char* end = nullptr;
  const uint64_t value = std::strtoull(s.c_str(), &end, base);
  if (s.empty() || *end != '\0') return false;
  out = static_cast<int64_t>(negative ? 0 - value : value);
  return true;
}

bool parse_literal(const std::string& text, Operand& out) {
  out.kind = Operand::imm;
  int64_t value;
  if (parse_integer(text, value)) {
    out.bits = static_cast<uint64_t>(value);
    return true;
  }
  const bool negative = text[0] == '-';
  const std::string s = text.substr(negative ? 1 : 0);
  if (s.empty() || !std::isdigit(static_cast<unsigned char>(s[0]))) return false;
  // Only the first two characters are the prefix: 0f3F20F3EB has another "0F" inside.
  const char kind = s.size() > 2 && s[0] == '0' ? static_cast<char>(std::tolower(s[1])) : '\0';
  char* end = nullptr;
  if (kind == 'f' || kind == 'd') {
    const unsigned digits = kind == 'f' ? 8 : 16;
    out.bits = std::strtoull(s.c_str() + 2, &end, 16);
    if (s.size() != digits + 2 || *end != '\0') return false;
    out.literal = kind == 'f' ? Ty::f32 : Ty::f64;
  } else {
    const double number = std::strtod(s.c_str(), &end);
    if (*end != '\0') return false;
    std::memcpy(&out.bits, &number, 8);
    out.literal = Ty::f64;
  }
  if (negative) out.bits ^= out.literal == Ty::f32 ? 0x80000000ull : 1ull << 63;
  return true;
}

}  // namespace ptx
