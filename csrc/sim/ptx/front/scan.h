// Reading PTX text: positions with line numbers, literals, and splitting at the top level of brackets.
#pragma once
#include <string>
#include <vector>

#include "front/ir.h"

namespace ptx {

class Scanner {
 public:
  explicit Scanner(const std::string& text);  // comments become blanks, so that lines stay what they were
  bool at_end();                              // skips white space
  char peek();                                // the next character that is not white space; 0 at the end
  bool take(char c);                          // consumes it when it is next
  void expect(char c, const char* where);
  std::string word();                   // [.%$_a-zA-Z0-9]+, may be empty; "::" counts as part of it
  bool take_label(std::string& name);   // `name:`
  std::string until(const char* ends);  // up to one of `ends` outside brackets and strings; consumes it
  std::string rest_of_line();
  std::string quoted();
  int line() const { return line_; }
  size_t position() const { return at_; }
  [[noreturn]] void fail(const std::string& what) const;

 private:
  void advance();
  std::string text_;
  size_t at_ = 0;
  int line_ = 1;
};

std::string trim(const std::string&);
std::vector<std::string> split_top(const std::string&, char at);  // outside (), [], {} and strings, trimmed
bool is_identifier(const std::string&);
// Integer and floating-point literals of PTX ISA 4.5. False when the text is none.
bool parse_literal(const std::string&, Operand& out);
bool parse_integer(const std::string&, int64_t& out);

}  // namespace ptx
