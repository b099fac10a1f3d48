#include "call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "op.h"

namespace py = pybind11;
using torch::jit::Stack;

namespace attnkit {

namespace {

// One argument of a schema: what is accepted for it without asking torch, and what stands for it where it is left out.
struct Argument {
  PyObject* name;  // interned, as the names in a call are
  c10::TypeKind kind;
  bool optional, required;
  c10::IValue missing;

  // Pushes ``given`` as torch converts it. False: of another type, which torch converts or refuses.
  bool push(PyObject* given, Stack& stack) const;
};

bool Argument::push(PyObject* given, Stack& stack) const {
  if (given == Py_None) {
    if (optional) stack.emplace_back();
    return optional;
  }
  switch (kind) {
    case c10::TypeKind::TensorType:  // no subclass: those may have a __torch_function__
      if (!THPVariable_CheckExact(given)) return false;
      stack.emplace_back(THPVariable_Unpack(given));
      return true;
    case c10::TypeKind::FloatType: {
      if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) return false;
      const double number = PyFloat_AsDouble(given);
      if (PyErr_Occurred()) return PyErr_Clear(), false;  // an int beyond all of them
      stack.emplace_back(number);
      return true;
    }
    case c10::TypeKind::IntType: {
      int overflow = 0;
      if (!PyLong_CheckExact(given)) return false;
      const int64_t number = PyLong_AsLongLongAndOverflow(given, &overflow);
      stack.emplace_back(number);
      return !overflow;
    }
    case c10::TypeKind::BoolType:
      if (!PyBool_Check(given)) return false;
      stack.emplace_back(given == Py_True);
      return true;
    case c10::TypeKind::StringType: {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_CheckExact(given) ? PyUnicode_AsUTF8AndSize(given, &size) : nullptr;
      if (!text) return PyErr_Clear(), false;  // of half a surrogate pair
      stack.emplace_back(std::string(text, size));
      return true;
    }
    case c10::TypeKind::ScalarTypeType:
      if (!THPDtype_Check(given)) return false;
      stack.emplace_back(int64_t(reinterpret_cast<THPDtype*>(given)->scalar_type));
      return true;
    default: return false;
  }
}

// The default overload of an op, called as torch calls it once a call is read.
class Caller {
 public:
  static constexpr size_t kMost = 32;  // arguments

  explicit Caller(const c10::OperatorHandle& op);

  // Positional arguments, then those of ``names``, in the order of the schema. False: torch must read the call, which
  // has a mode or a type that only Python knows about, or is wrong.
  bool read(PyObject* const* args, size_t positional, PyObject* names, Stack& stack) const;

  // The result, or null and Python's error. What is in the stack is used up.
  PyObject* call(Stack&& stack) const;

 private:
  c10::OperatorHandle op_;
  std::vector<Argument> arguments_;
  size_t positional_ = 0;  // so many may be given by position
};

Caller::Caller(const c10::OperatorHandle& op) : op_(op) {
  for (const c10::Argument& a : op.schema().arguments()) {
    auto type = a.real_type();
    const auto optional = type->cast<c10::OptionalType>();
    if (optional) type = optional->getElementType();
    const auto& missing = a.default_value();
    arguments_.push_back({PyUnicode_InternFromString(a.name().c_str()), type->kind(), optional != nullptr, !missing,
                          missing.value_or(c10::IValue())});
    if (!a.kwarg_only()) positional_ = arguments_.size();
  }
}

bool Caller::read(PyObject* const* args, size_t positional, PyObject* names, Stack& stack) const {
  if (positional > positional_ || at::impl::torch_function_mode_enabled()) return false;
  PyObject* given[kMost] = {};
  std::copy(args, args + positional, given);
  const size_t named = names ? PyTuple_GET_SIZE(names) : 0;
  for (size_t n = 0; n < named; n++) {
    size_t i = positional;  // a name from before is given twice
    while (i < arguments_.size() && arguments_[i].name != PyTuple_GET_ITEM(names, n)) i++;
    if (i == arguments_.size()) return false;
    given[i] = args[positional + n];
  }
  stack.reserve(arguments_.size());
  for (size_t i = 0; i < arguments_.size(); i++) {
    const Argument& a = arguments_[i];
    if (given[i] ? !a.push(given[i], stack) : a.required) return false;
    if (!given[i]) stack.push_back(a.missing);
  }
  return true;
}

PyObject* Caller::call(Stack&& stack) const {
  // The last reference of C++ to a tensor of Python's is given up with the interpreter's lock. Without it here, the
  // kernel would take that lock for each argument that it drops.
  c10::SmallVector<at::Tensor, 16> held;
  for (const c10::IValue& value : stack)
    if (value.isTensor()) held.push_back(value.toTensor());
  try {
    {
      py::gil_scoped_release without;
      op_.callBoxed(&stack);
    }
    return torch::jit::createPyObjectForStack(std::move(stack)).release().ptr();
  } catch (const py::builtin_exception& error) {
    error.set_error();
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Behind the fields of an OpOverloadPacket, whose size Python alone knows. Packets live as long as the process.
struct Quick {
  vectorcallfunc call;  // where Python looks for it
  const Caller* caller;
  PyObject* general;  // __call__ of the base class, bound to the packet
};

PyTypeObject* base = nullptr;
PyTypeObject* type = nullptr;

Quick& quick(PyObject* packet) {
  return *reinterpret_cast<Quick*>(reinterpret_cast<char*>(packet) + base->tp_basicsize);
}

PyObject* call_packet(PyObject* packet, PyObject* const* args, size_t flags, PyObject* names) {
  const Quick& q = quick(packet);
  if (!switched_off.load(std::memory_order_relaxed)) {
    Stack stack;
    if (q.caller->read(args, PyVectorcall_NARGS(flags), names, stack)) return q.caller->call(std::move(stack));
  }
  return PyObject_Vectorcall(q.general, args, flags, names);
}

void make_type() {
  py::object packet = py::module_::import("torch._ops").attr("OpOverloadPacket");
  base = reinterpret_cast<PyTypeObject*>(packet.release().ptr());
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, base->tp_basicsize, READONLY, nullptr}, {}};
  PyType_Slot slots[] = {{Py_tp_members, members}, {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)}, {}};
  PyType_Spec spec{"torch_attnkit.core.native.QuickPacket", int(base->tp_basicsize + sizeof(Quick)), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject*>(base)));
  if (!type) throw py::error_already_set();
}

}  // namespace

py::object quick_packet(const py::object& original) {
  if (!type) make_type();
  const auto name = original.attr("_qualified_op_name").cast<std::string>();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  if (op.schema().arguments().size() > Caller::kMost || op.schema().is_vararg()) return py::none();
  py::object made = py::handle(reinterpret_cast<PyObject*>(type))(
      name, original.attr("__name__"), original.attr("_op"), original.attr("_overload_names"));
  made.attr("__module__") = original.attr("__module__");
  const py::object general = py::handle(reinterpret_cast<PyObject*>(base)).attr("__call__");
  quick(made.ptr()) = {call_packet, new Caller(op), PyMethod_New(general.ptr(), made.ptr())};
  return made;
}

}  // namespace attnkit
