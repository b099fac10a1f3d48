#include "op.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <mutex>

namespace py = pybind11;
using torch::jit::Stack;

namespace attnkit {

std::atomic<int> switched_off{0};
std::atomic<bool> asks_for_setting{false};

namespace {

// The bytes from the first to the last that a tensor reaches.
std::pair<const char*, const char*> extent(const at::Tensor& t) {
  const auto* begin = static_cast<const char*>(address(t));
  int64_t last = t.numel() ? 1 : 0;
  for (int64_t i = 0; last && i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  return {begin, begin + last * int64_t(t.itemsize())};
}

// Whether tensors that reach into one another share no byte all the same: rows of one beside rows of the other, as keys
// and values that lie side by side in a buffer. Steps between rows are equal, and multiples of the smallest.
bool interleaved(const at::Tensor& a, const at::Tensor& b) {
  const int64_t last = a.dim() - 1, item = a.itemsize();
  if (last < 1 || b.dim() != a.dim() || item != int64_t(b.itemsize()) || a.stride(last) != 1 || b.stride(last) != 1)
    return false;
  int64_t least = 0;
  for (int64_t i = 0; i < last; i++) {
    if (a.size(i) != b.size(i)) return false;
    if (a.size(i) == 1) continue;
    if (a.stride(i) != b.stride(i)) return false;
    least = least ? std::min(least, a.stride(i)) : a.stride(i);
  }
  for (int64_t i = 0; least && i < last; i++)
    if (a.size(i) > 1 && a.stride(i) % least) return false;
  const bool swapped = address(b) < address(a);
  const auto& first = swapped ? b : a;
  const auto& second = swapped ? a : b;
  const int64_t ahead = static_cast<const char*>(address(second)) - static_cast<const char*>(address(first));
  return ahead >= first.size(last) * item && (!least || ahead + second.size(last) * item <= least * item);
}

}  // namespace

Op::Op(const c10::FunctionSchema& schema, uint64_t plain, bool host, size_t most, Answers answers)
    : count_(schema.arguments().size()),
      returns_(schema.returns().size()),
      plain_(plain),
      host_(host),
      most_(most),
      answers_(std::move(answers)) {
  for (size_t i = 0; i < count_; i++) {
    const c10::Argument& a = schema.arguments()[i];
    if (a.alias_info() && a.alias_info()->isWrite()) mutated_.push_back(i);
    auto type = a.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::TensorType) tensors_.push_back(i);
    dtypes_.push_back(type->kind() == c10::TypeKind::ScalarTypeType);
  }
}

void Op::call(c10::DispatchKeySet keys, Stack* stack, bool autograd) {
  const size_t first = stack->size() - count_;
  Given given(count_, nullptr);
  bool grad = false, tangent = false, whole = true;
  for (size_t i = 0; i < count_; i++) {
    const c10::IValue& value = (*stack)[first + i];
    if (!value.isTensor()) continue;
    const at::Tensor& t = value.toTensor();
    whole = whole && t.defined();  // None in the place of a tensor that must be there
    given[i] = &t;
    if (autograd && t.defined()) grad = grad || t.requires_grad(), tangent = tangent || t._fw_grad(0).defined();
  }
  if (autograd && (keys.raw_repr() != plain_ || tangent || (grad && at::GradMode::is_enabled())))
    return python(answers_.general, stack);
  if (!whole) return python(answers_.direct, stack);

  if (autograd)
    for (size_t i : mutated_)
      if (!given[i]->is_inference()) given[i]->unsafeGetTensorImpl()->bump_version();
  Key key;
  if (switched_off.load(std::memory_order_relaxed) || !put(*stack, given, key)) return python(answers_.direct, stack);
  const uint64_t hash = key.hash();
  const auto entry = find(key, hash);
  if (!entry) return miss(key, hash, stack);
  if (!entry->plan && !entry->host) return python(answers_.direct, stack);

  Tensors outputs;
  const Ran ran = entry->plan ? entry->plan->run(given.data(), outputs)
                  : entry->host->run(given.data(), outputs) ? Ran::kYes : Ran::kRefused;
  if (ran == Ran::kYes) {
    repeated_.fetch_add(1, std::memory_order_relaxed);
    torch::jit::drop(*stack, count_);
    for (auto& t : outputs) stack->emplace_back(std::move(t));
    return;
  }
  const at::Device device = (*std::find_if(given.begin(), given.end(), [](auto t) { return t; }))->device();
  python(answers_.direct, stack);
  if (ran == Ran::kNewStream) {
    py::gil_scoped_acquire gil;
    answers_.room(device);
    entry->plan->prove();
  }
}

// The simulated arch that a call on CPU tensors belongs to. False: it is Python's.
bool Op::put_setting(Key& key) const {
  std::string arch;
  if (asks_for_setting.load(std::memory_order_relaxed) && !answers_.setting.is_none()) {
    py::gil_scoped_acquire gil;
    const py::object setting = answers_.setting();
    if (!setting.is_none()) arch = setting.cast<std::string>();
  }
  key.put(arch);
  return arch.empty() || !host_;
}

// The words of a call. False: its plan would hold for no other call, or it has an argument of no known kind.
bool Op::put(const Stack& stack, Given& given, Key& key) const {
  const size_t first = stack.size() - count_;
  if (!put_setting(key)) return false;
  for (size_t i : mutated_) given[i]->unsafeGetTensorImpl()->mutable_data();  // a lazy copy is made now, not later
  for (size_t i = 0; i < count_; i++) {
    if (!given[i]) {
      key.put(stack[first + i]);
      continue;
    }
    // Which argument begins at the same address: a kernel may read the two as one.
    size_t twin = host_ ? i : 0;
    while (twin < i && !(given[twin] && address(*given[twin]) == address(*given[i]))) twin++;
    key.put(uint64_t(twin)), key.put(*given[i], host_ ? 1 : kAlignment);
  }
  return key.fits && !overlap(given);
}

// Whether what is written to shares memory with another argument: then Python looks how.
bool Op::overlap(const Given& given) const {
  for (size_t m : mutated_) {
    const auto [begin, end] = extent(*given[m]);
    for (size_t i = 0; i < count_; i++) {
      if (i == m || !given[i]) continue;
      const auto [other_begin, other_end] = extent(*given[i]);
      if (begin < other_end && other_begin < end && !interleaved(*given[m], *given[i])) return true;
    }
  }
  return false;
}

std::shared_ptr<Op::Entry> Op::find(const Key& key, uint64_t hash) {
  std::shared_lock<std::shared_mutex> read(lock_);
  const auto found = entries_.find(hash);
  if (found == entries_.end()) return nullptr;
  const auto& words = found->second->key;
  const bool same = words.size() == key.size && !std::memcmp(words.data(), key.words, 8 * words.size());
  return same ? found->second : nullptr;
}

void Op::keep(const Key& key, uint64_t hash, std::shared_ptr<Entry> entry) {
  entry->key.assign(key.words, key.words + key.size);
  decltype(entries_) old;  // goes without the lock
  std::unique_lock<std::shared_mutex> write(lock_);
  if (entries_.size() >= most_) old.swap(entries_);
  std::swap(entries_[hash], entry);
}

void Op::clear() {
  decltype(entries_) old;
  std::unique_lock<std::shared_mutex> write(lock_);
  old.swap(entries_);
}

size_t Op::size() {
  std::shared_lock<std::shared_mutex> read(lock_);
  return entries_.size();
}

void Op::miss(const Key& key, uint64_t hash, Stack* stack) {
  py::gil_scoped_acquire gil;
  const auto [result, recipe] = py::object(answers_.missed(*arguments(*stack))).cast<std::pair<py::object, py::object>>();
  if (!recipe.is_none()) {
    auto entry = std::make_shared<Entry>();
    if (host_ && !recipe.is(py::bool_(false))) {
      const auto [kernel, outputs] = recipe.cast<std::pair<py::object, std::vector<at::Tensor>>>();
      entry->host = std::make_unique<HostPlan>(kernel, outputs, tensors_);
    } else if (!recipe.is(py::bool_(false))) {
      entry->plan = std::make_unique<Plan>(recipe);
      entry->plan->prove();
    }
    keep(key, hash, std::move(entry));
  }
  answer(stack, result);
}

py::tuple Op::arguments(const Stack& stack) const {
  const size_t first = stack.size() - count_;
  py::tuple found(count_);
  for (size_t i = 0; i < count_; i++) {
    const c10::IValue& value = stack[first + i];
    found[i] = dtypes_[i] && value.isInt() ? py::cast(static_cast<at::ScalarType>(value.toInt()))
                                           : torch::jit::toPyObject(value);
  }
  return found;
}

void Op::answer(Stack* stack, const py::object& result) const {
  torch::jit::drop(*stack, count_);
  if (returns_ == 1) stack->emplace_back(result.cast<at::Tensor>());
  if (returns_ > 1)
    for (const auto& t : result.cast<py::tuple>()) stack->emplace_back(t.cast<at::Tensor>());
}

void Op::python(const py::object& function, Stack* stack) const {
  py::gil_scoped_acquire gil;
  answer(stack, function(*arguments(*stack)));
}

}  // namespace attnkit
