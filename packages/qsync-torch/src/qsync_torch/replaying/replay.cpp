// Programs that were recorded of an operator's forward and backward (qsync_torch/replaying/recording.py), run without Python's
// frames, and the node of autograd's graph that stands for such an operator.
#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

namespace py = pybind11;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// A tensor's address, `offset` bytes on: of slot `slot`, to be put at `place`.
struct Address {
  int64_t place, slot, offset;
};

struct Step {
  virtual ~Step() = default;
  virtual void run(std::vector<Tensor>& slots, int64_t device) const = 0;
};

struct Allocate : Step {
  int64_t out;
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  void run(std::vector<Tensor>& slots, int64_t) const override { slots[out] = at::empty_strided(sizes, strides, options); }
};

struct View : Step {
  int64_t out, source, offset;
  std::vector<int64_t> sizes, strides;
  void run(std::vector<Tensor>& slots, int64_t) const override {
    const Tensor& base = slots[source];
    slots[out] = base.as_strided(sizes, strides, base.storage_offset() + offset);
  }
};

struct Operator : Step {
  c10::OperatorHandle handle;
  std::vector<c10::IValue> arguments;
  std::vector<std::pair<int64_t, int64_t>> tensors;  // argument, slot
  std::vector<int64_t> outs;                         // a slot for each result; -1: not asked for
  explicit Operator(c10::OperatorHandle found) : handle(std::move(found)) {}
  void run(std::vector<Tensor>& slots, int64_t) const override {
    torch::jit::Stack stack(arguments);
    for (auto [argument, slot] : tensors) stack[argument] = slots[slot];
    handle.callBoxed(stack);
    for (size_t i = 0; i < outs.size() && i < stack.size(); i++)
      if (outs[i] >= 0) slots[outs[i]] = stack[i].toTensor();
  }
};

// A function of Python's that launches a kernel: no code of Python runs where it is one in C.
struct Call : Step {
  py::object function;
  std::vector<py::object> arguments;
  std::vector<Address> addresses;
  std::vector<std::pair<int64_t, int64_t>> tensors;
  int64_t stream = -1;
  py::object stream_of;  // of a device's index: the stream that PyTorch uses now, as an address
  void run(std::vector<Tensor>& slots, int64_t device) const override {
    constexpr size_t most = 96;
    PyObject* given[most];
    if (arguments.size() > most) throw std::runtime_error("too many arguments of a launch");
    std::vector<py::object> own;
    own.reserve(addresses.size() + tensors.size() + 1);
    for (size_t i = 0; i < arguments.size(); i++) given[i] = arguments[i].ptr();
    auto put = [&](int64_t place, PyObject* made) {
      own.push_back(py::reinterpret_steal<py::object>(made));
      given[place] = made;
    };
    for (const auto& a : addresses)
      put(a.place, PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(slots[a.slot].data_ptr()) + a.offset));
    for (auto [place, slot] : tensors) put(place, THPVariable_Wrap(slots[slot]));
    if (stream >= 0) put(stream, stream_of(device).release().ptr());
    PyObject* result = PyObject_Vectorcall(function.ptr(), given, arguments.size(), nullptr);
    if (!result) throw py::error_already_set();
    Py_DECREF(result);
  }
};

// A C function of one structure, which returns 0.
struct CCall : Step {
  int (*function)(void*);
  std::string bytes;
  std::vector<Address> addresses;
  int64_t stream;
  py::object stream_of, fails;
  void run(std::vector<Tensor>& slots, int64_t device) const override {
    std::string own(bytes);
    auto put = [&](int64_t place, uint64_t value) { std::memcpy(own.data() + place, &value, sizeof value); };
    for (const auto& a : addresses) put(a.place, reinterpret_cast<uintptr_t>(slots[a.slot].data_ptr()) + a.offset);
    put(stream, stream_of(device).cast<uint64_t>());
    if (int status = function(own.data())) fails(status);
  }
};

std::vector<Address> addresses_of(const py::list& found) {
  std::vector<Address> made;
  for (auto one : found) {
    auto [place, slot, offset] = one.cast<std::tuple<int64_t, int64_t, int64_t>>();
    made.push_back({place, slot, offset});
  }
  return made;
}

c10::IValue constant(const py::handle& value) {
  PyObject* object = value.ptr();
  if (value.is_none()) return {};
  if (PyBool_Check(object)) return value.cast<bool>();
  if (PyLong_Check(object)) return value.cast<int64_t>();
  if (PyFloat_Check(object)) return value.cast<double>();
  if (THPDevice_Check(object)) return reinterpret_cast<THPDevice*>(object)->device;
  if (THPMemoryFormat_Check(object)) return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(object)->memory_format);
  if (THPLayout_Check(object)) return static_cast<int64_t>(reinterpret_cast<THPLayout*>(object)->layout);
  if (THPDtype_Check(object)) return static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type);
  if (PyList_Check(object) || PyTuple_Check(object)) {
    auto items = py::reinterpret_borrow<py::sequence>(value);
    if (items.size() && PyBool_Check(items[0].ptr())) {
      c10::List<bool> made;
      for (auto one : items) made.push_back(one.cast<bool>());
      return made;
    }
    return items.cast<std::vector<int64_t>>();
  }
  throw py::value_error("a constant that a program cannot hold");
}

struct Program {
  int64_t slots = 0;
  std::vector<std::shared_ptr<Step>> steps;
  std::vector<int64_t> outputs;  // -1: none
  std::unordered_map<int64_t, size_t> last;  // the last step that has to do with a slot
  mutable std::vector<std::vector<int64_t>> ended;  // by step: slots that no later one reads, whose memory is free then, as in Python

  void uses(int64_t slot) { last[slot] = steps.size(); }
  void uses(const std::vector<Address>& found) {
    for (const auto& one : found) uses(one.slot);
  }
  void find_ends() const {
    ended.assign(steps.size(), {});
    for (auto [slot, step] : last)
      if (std::find(outputs.begin(), outputs.end(), slot) == outputs.end()) ended[step].push_back(slot);
  }

  void allocate(int64_t out, std::vector<int64_t> sizes, std::vector<int64_t> strides, const Tensor& like) {
    auto step = std::make_shared<Allocate>();
    step->out = out, step->sizes = std::move(sizes), step->strides = std::move(strides), step->options = like.options();
    uses(out);
    steps.push_back(step);
  }
  void view(int64_t out, int64_t source, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset) {
    auto step = std::make_shared<View>();
    step->out = out, step->source = source, step->offset = offset;
    step->sizes = std::move(sizes), step->strides = std::move(strides);
    uses(out), uses(source);
    steps.push_back(step);
  }
  // Raises ValueError for a constant that it cannot hold.  `tensors`: slots, by the place of a tensor among the schema's arguments.
  void op(const std::string& name, const std::string& overload, const py::dict& constants,
          std::vector<std::pair<std::string, int64_t>> tensors, std::vector<int64_t> outs) {
    auto step = std::make_shared<Operator>(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
    const auto& arguments = step->handle.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto place = std::to_string(i);
      const auto& called = arguments[i].name();
      auto value = arguments[i].default_value();
      for (const auto& given : {place, called})
        if (constants.contains(given)) value = constant(constants[py::str(given)]);
      if (value && value->isScalar() && arguments[i].type()->isSubtypeOf(*c10::OptionalType::ofTensor()))
        value = at::native::wrapped_scalar_tensor(value->toScalar());
      step->arguments.push_back(value ? *value : c10::IValue());
      for (const auto& [given, slot] : tensors)
        if (given == place || given == called) step->tensors.emplace_back(i, slot);
    }
    step->outs = std::move(outs);
    for (const auto& [argument, slot] : step->tensors) uses(slot);
    for (auto slot : step->outs)
      if (slot >= 0) uses(slot);
    steps.push_back(step);
  }
  void call(py::object function, const py::list& arguments, const py::list& addresses,
            std::vector<std::pair<int64_t, int64_t>> tensors, int64_t stream, py::object stream_of) {
    auto step = std::make_shared<Call>();
    step->stream_of = std::move(stream_of);
    step->function = std::move(function);
    for (auto one : arguments) step->arguments.push_back(py::reinterpret_borrow<py::object>(one));
    step->addresses = addresses_of(addresses), step->tensors = std::move(tensors), step->stream = stream;
    uses(step->addresses);
    for (const auto& [place, slot] : step->tensors) uses(slot);
    steps.push_back(step);
  }
  void c_call(uintptr_t function, py::bytes bytes, const py::list& addresses, int64_t stream, py::object stream_of, py::object fails) {
    auto step = std::make_shared<CCall>();
    step->stream_of = std::move(stream_of);
    step->function = reinterpret_cast<int (*)(void*)>(function), step->bytes = bytes;
    step->addresses = addresses_of(addresses), step->stream = stream, step->fails = std::move(fails);
    uses(step->addresses);
    steps.push_back(step);
  }
  // The interpreter's lock is held.
  variable_list run(const variable_list& inputs) const {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::vector<Tensor> kept(slots);
    std::copy(inputs.begin(), inputs.end(), kept.begin());
    c10::OptionalDeviceGuard guard;
    int64_t device = 0;
    if (inputs[0].device().is_cuda()) guard.reset_device(inputs[0].device()), device = inputs[0].get_device();
    if (ended.size() != steps.size()) find_ends();
    for (size_t i = 0; i < steps.size(); i++) {
      steps[i]->run(kept, device);
      for (auto slot : ended[i]) kept[slot].reset();
    }
    variable_list found;
    found.reserve(outputs.size());
    for (auto slot : outputs) found.push_back(slot < 0 ? Tensor() : kept[slot]);
    return found;
  }
};

using Key = std::vector<int64_t>;
struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603ull;
    for (auto word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211ull;
    return hash ^ (hash >> 29);
  }
};

void describe(Key& key, const Tensor& x) {
  if (!x.defined()) {
    key.push_back(-1);
    return;
  }
  const auto sizes = x.sizes(), strides = x.strides();
  auto aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  key.push_back(static_cast<int64_t>(sizes.size()) << 32 | static_cast<int64_t>(x.scalar_type()) << 16 |
                static_cast<int64_t>(x.device().type()) << 12 | static_cast<int64_t>(x.device().index() + 1) << 1 | aligned);
  key.insert(key.end(), sizes.begin(), sizes.end());
  key.insert(key.end(), strides.begin(), strides.end());
}

bool is_plain(const Tensor& x) {
  return !x.defined() || (x.layout() == at::kStrided && !x.is_neg() && !x.is_conj() && !x.is_inference() && x.has_storage() &&
                          (x.is_cpu() || x.is_cuda()) &&
                          !x.is_nested() && !torch::autograd::isFwGradDefined(x) && !x.key_set().has(at::DispatchKey::Python));
}

bool is_watched() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() || c10::InferenceMode::is_enabled() ||
         at::tracer::impl::is_dispatch_enabled() ||
         c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Programs by what they read; recorded where the same is asked for again.
struct Programs {
  struct Entry {
    int64_t seen = 0;
    std::shared_ptr<Program> program;
  };
  std::unordered_map<Key, Entry, Hash> entries;
  static constexpr size_t most = 1024;

  template <typename Record>
  std::shared_ptr<Program> find(const Key& key, Record record) {
    if (entries.size() >= most) entries.clear();
    {
      auto& entry = entries[key];
      if (entry.program || entry.seen > 1) return entry.program;
      if (entry.seen++ == 0) return nullptr;
    }
    auto made = record();
    return entries[key].program = made;
  }
  int64_t count() const {
    return std::count_if(entries.begin(), entries.end(), [](const auto& one) { return static_cast<bool>(one.second.program); });
  }
};

py::object wrapped(const Tensor& x) {
  return py::reinterpret_steal<py::object>(x.defined() ? THPVariable_Wrap(x) : Py_NewRef(Py_None));
}

py::tuple all_wrapped(const variable_list& found) {
  py::tuple made(found.size());
  for (size_t i = 0; i < found.size(); i++) made[i] = wrapped(found[i]);
  return made;
}

Tensor unwrapped(const py::handle& x) { return x.is_none() ? Tensor() : THPVariable_Unpack(x.ptr()); }

bool is_exact(const py::handle& x) { return x.is_none() || THPVariable_CheckTypeExact(Py_TYPE(x.ptr())); }

// A function of tensors and constants that Python gives: `record(*arguments)` gives a program of the tensors among them, or None.
struct Replayed {
  Programs programs;
  py::object record;
  explicit Replayed(py::object record_) : record(std::move(record_)) {}

  static void describe_constant(Key& key, PyObject* value) {
    if (PyLong_Check(value)) {
      key.push_back(PyLong_AsLongLong(value));
    } else if (PyList_Check(value) || PyTuple_Check(value)) {
      auto items = py::reinterpret_borrow<py::sequence>(value);
      key.push_back(static_cast<int64_t>(items.size()));
      for (auto one : items) describe_constant(key, one.ptr());
    } else {
      key.push_back(PyObject_Hash(value));
    }
    if (PyErr_Occurred()) throw py::error_already_set();
  }

  // A tuple of tensors, or None where Python is to run it.
  py::object call(const py::args& arguments) {
    if (is_watched()) return py::none();
    variable_list tensors;
    Key key;
    for (auto one : arguments) {
      if (!THPVariable_Check(one.ptr())) {
        key.push_back(-2);
        describe_constant(key, one.ptr());
        continue;
      }
      if (!is_exact(one)) return py::none();
      tensors.push_back(THPVariable_Unpack(one.ptr()));
      if (!is_plain(tensors.back())) return py::none();
      describe(key, tensors.back());
    }
    auto program = programs.find(key, [&]() -> std::shared_ptr<Program> {
      py::object made = record(*arguments);
      return made.is_none() ? nullptr : made.cast<std::shared_ptr<Program>>();
    });
    if (!program) return py::none();
    return all_wrapped(program->run(tensors));
  }
};

constexpr size_t saved_count = 6;

// An operator of a plan: `record(backward, tensors, needs, shape, dtype)` gives a program or None; `slow(name, tensors, needs, shape,
// dtype)` gives the gradients by Python.  It is never freed, as the bindings that have one are not: graphs hold its address.
struct Lowered {
  Programs forwards, backwards;
  py::object record, slow;

  Lowered(py::object record_, py::object slow_) : record(std::move(record_)), slow(std::move(slow_)) {}

  std::shared_ptr<Program> recorded(bool backward, const variable_list& tensors, const py::tuple& more) {
    py::object made = record(backward, all_wrapped(tensors), *more);
    return made.is_none() ? nullptr : made.cast<std::shared_ptr<Program>>();
  }
  py::object call(py::object x, py::object weight, py::object bias, py::object offset, py::object copy, bool wants_copy,
                  const std::string& name);
};

using Needs = std::array<bool, 3>;

// A node keeps numbers and a name beside its tensors, which compiled autograd can read.  What a gradient is rounded to depends on which
// others are computed: they are those that the forward was asked for, as in Python, whatever `torch.autograd.grad` wants of them.
struct QuantizedProduct : torch::autograd::Function<QuantizedProduct> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const variable_list* found, const Lowered* lowered, const std::string* name, const Needs* needs) {
    std::vector<int64_t> kept{static_cast<int64_t>(reinterpret_cast<intptr_t>(lowered)), static_cast<int64_t>(x.scalar_type())};
    kept.insert(kept.end(), needs->begin(), needs->end());
    kept.insert(kept.end(), x.sizes().begin(), x.sizes().end());
    ctx->saved_data["kept"] = kept, ctx->saved_data["name"] = *name;
    ctx->save_for_backward(variable_list(found->begin() + 1, found->begin() + 1 + saved_count));
    return (*found)[0];
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto kept = ctx->saved_data["kept"].toIntVector();
    auto* lowered = reinterpret_cast<Lowered*>(static_cast<intptr_t>(kept[0]));
    variable_list tensors{grads[0]}, found(7);
    for (auto& one : ctx->get_saved_variables()) tensors.push_back(one);
    py::gil_scoped_acquire held;
    bool fast = !at::GradMode::is_enabled() && !is_watched();
    for (const auto& one : tensors) fast = fast && is_plain(one);
    auto more = [&] {
      auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(kept[1])));
      return py::make_tuple(py::make_tuple(kept[2] != 0, kept[3] != 0, kept[4] != 0),
                            std::vector<int64_t>(kept.begin() + 5, kept.end()), py::reinterpret_borrow<py::object>(dtype));
    };
    if (fast) {
      Key key(kept.begin() + 1, kept.end());
      for (const auto& one : tensors) describe(key, one);
      auto program = lowered->backwards.find(key, [&] { return lowered->recorded(true, tensors, more()); });
      if (program) {
        auto made = program->run(tensors);
        std::copy(made.begin(), made.end(), found.begin());
        return found;
      }
    }
    py::tuple made = lowered->slow(ctx->saved_data["name"].toStringRef(), all_wrapped(tensors), *more());
    for (int i = 0; i < 3; i++) found[i] = unwrapped(made[i]);
    return found;
  }
};

// The result and, where it is wanted, the activation's copy; None where Python is to run the operator.
py::object Lowered::call(py::object x_, py::object weight_, py::object bias_, py::object offset_, py::object copy, bool wants_copy,
                         const std::string& name) {
  if (!is_exact(x_) || !is_exact(weight_) || !is_exact(bias_) || is_watched()) return py::none();
  Tensor x = unwrapped(x_), weight = unwrapped(weight_), bias = unwrapped(bias_), offset = unwrapped(offset_);
  if (!is_plain(x) || !is_plain(weight) || !is_plain(bias) || x.device() != weight.device()) return py::none();
  bool enabled = at::GradMode::is_enabled();
  Needs need{enabled && x.requires_grad(), enabled && weight.requires_grad(), enabled && bias.defined() && bias.requires_grad()};
  variable_list tensors{x, weight, bias, offset};
  if (!copy.is_none())
    for (auto part : copy) tensors.push_back(unwrapped(part));
  Key key{need[0] + 2 * need[1] + 4 * need[2] + 8 * enabled};
  for (const auto& one : tensors) describe(key, one);
  auto needs = [&] { return py::make_tuple(py::make_tuple(need[0], need[1], need[2]), enabled, py::none()); };
  auto program = forwards.find(key, [&] { return recorded(false, tensors, needs()); });
  if (!program) return py::none();
  auto found = program->run(tensors);
  Tensor y = found[0];
  if (need[0] || need[1] || need[2]) {
    y = QuantizedProduct::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, &found, this, &name, &need);
  }
  if (!wants_copy) return wrapped(y);
  py::tuple parts(found.size() - 1 - saved_count);
  for (size_t i = 0; i < parts.size(); i++) parts[i] = wrapped(found[1 + saved_count + i]);
  return py::make_tuple(wrapped(y), parts);
}

// What a node of autograd's graph keeps for its backward, if it is one of these operators.
py::tuple saved_by(const py::handle& node) {
  if (!torch::autograd::THPCppFunction_Check(node.ptr())) return py::tuple();
  auto* of = &*reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
  auto* ours = dynamic_cast<torch::autograd::CppNode<QuantizedProduct>*>(of);
  return ours ? all_wrapped(ours->ctx_.get_saved_variables()) : py::tuple();
}

}  // namespace

PYBIND11_MODULE(QSYNC_MODULE, module) {
  module.def("saved_by", &saved_by);
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init<>())
      .def_readwrite("slots", &Program::slots)
      .def_readwrite("outputs", &Program::outputs)
      .def("allocate", [](Program& p, int64_t out, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                          py::object like) { p.allocate(out, std::move(sizes), std::move(strides), unwrapped(like)); })
      .def("view", &Program::view)
      .def("op", &Program::op)
      .def("call", &Program::call)
      .def("c_call", &Program::c_call)
      .def("run", [](const Program& p, const py::tuple& inputs) {
        variable_list tensors;
        for (auto one : inputs) tensors.push_back(unwrapped(one));
        return all_wrapped(p.run(tensors));
      });
  py::class_<Replayed, std::shared_ptr<Replayed>>(module, "Replayed")
      .def(py::init<py::object>())
      .def("__call__", &Replayed::call)
      .def("programs", [](const Replayed& of) { return of.programs.count(); });
  py::class_<Lowered, std::unique_ptr<Lowered, py::nodelete>>(module, "Lowered")
      .def(py::init<py::object, py::object>())
      .def("__call__", &Lowered::call)
      .def("programs", [](const Lowered& of) { return std::make_pair(of.forwards.count(), of.backwards.count()); });
}
