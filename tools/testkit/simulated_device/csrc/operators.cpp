#include <Python.h>

#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "backend.h"

namespace simulated {

namespace {

using torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_privateuseone(); }

std::mutex waiting_mutex;
std::map<std::string, int64_t> waiting;

// ---- what an operator is called with

// Calls `visit(tensor)` for each tensor of an argument or result, which it may replace.
template <class Visit>
void each_tensor(c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    at::Tensor tensor = value.toTensor();
    visit(tensor);
    value = tensor;
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) visit(tensor);
    value = c10::List<at::Tensor>(list);
  } else if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorVector();
    for (auto& tensor : list)
      if (tensor.has_value() && tensor->defined()) visit(*tensor);
    c10::List<std::optional<at::Tensor>> replaced;
    for (auto& tensor : list) replaced.push_back(tensor);
    value = replaced;
  }
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

bool is_device(const c10::IValue& value) { return value.isDevice() && value.toDevice().is_privateuseone(); }

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Operators that take indices or lengths on the host beside tensors on the device.
bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_cudnn_rnn"};
  return names.count(name) > 0;
}

// Where an operator runs; raises if its tensors are on two devices.
int place_of(const c10::OperatorHandle& op, Stack& stack, size_t first) {
  int device = -1;
  const at::Tensor* stranger = nullptr;
  at::Tensor kept;
  bool host_tensors = takes_host_tensors(op.schema().name());
  for (size_t i = first; i < stack.size(); i++) {
    if (is_device(stack[i]) && device < 0) {
      auto where = stack[i].toDevice();
      device = where.has_index() ? where.index() : Streams::device();
    }
    each_tensor(stack[i], [&](at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (on_device(tensor)) {
        TORCH_CHECK(
            device < 0 || device == tensor.device().index(),
            "Expected all tensors to be on the same device, but found at least two devices, ",
            c10::Device(c10::DeviceType::PrivateUse1, device), " and ", tensor.device(), "! (", op.schema().name(), ")");
        device = tensor.device().index();
      } else if (tensor.dim() > 0 && !stranger && !host_tensors) {
        kept = tensor;
        stranger = &kept;
      }
    });
  }
  if (device < 0) device = Streams::device();
  TORCH_CHECK(
      !stranger, "Expected all tensors to be on the same device, but found at least two devices, ",
      c10::Device(c10::DeviceType::PrivateUse1, device), " and ", stranger->device(), "! (", op.schema().name(), ")");
  return device;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  at::Tensor meta = at::detail::empty_strided_meta(
      tensor.sizes(), tensor.strides(), tensor.scalar_type(), std::nullopt, at::Device(at::kMeta), std::nullopt);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// For a result that the caller gives: an empty one takes the right shape without a warning.
at::Tensor empty_meta(const at::Tensor& tensor) {
  return at::empty({0}, at::TensorOptions(at::kMeta).dtype(tensor.dtype()));
}

// Python registers more kernels for shapes than C++ does.
void import_shapes() {
  static bool imported = false;
  if (imported) return;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* module = PyImport_ImportModule("torch._meta_registrations");
  if (!module) PyErr_Clear();
  Py_XDECREF(module);
  PyGILState_Release(gil);
  imported = true;
}

bool knows_shapes(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) return false;
  for (const auto& result : op.schema().returns()) {
    auto kind = result.type()->kind();
    bool tensors = kind == c10::TypeKind::TensorType ||
        (kind == c10::TypeKind::ListType &&
         result.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType);
    if (!tensors) return false;
  }
  if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return true;
  import_shapes();
  return op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
}

class BelowEverything {  // the shapes are asked for below autograd, autocast and the modes of Python
  c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks};
};

std::string short_name(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// The argument that a result is, for operators that write into one.
const c10::IValue& written_argument(
    const c10::FunctionSchema& schema, const c10::Argument& result, const Stack& stack, size_t first) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].alias_info() && *arguments[i].alias_info() == *result.alias_info()) return stack[first + i];
  TORCH_CHECK(false, schema.name(), ": a result is none of the arguments that its schema names");
}

void copy_result(const c10::OperatorHandle& op, at::Tensor& to, const at::Tensor& from) {
  if (!to.defined() && !from.defined()) return;
  if (from.defined() && from.numel() == 0) return;  // what only training needs, such as the means of a batch norm
  TORCH_CHECK(
      to.defined() && from.defined() && to.sizes() == from.sizes(), short_name(op), ": the CPU's kernel gives ",
      from.defined() ? c10::str(from.sizes()) : "nothing", " where ", to.defined() ? c10::str(to.sizes()) : "nothing",
      " was expected");
  to.copy_(from);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  counts().operators++;
  Races::get().raise();
  Streams::get().raise_failure();
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  const size_t first = stack->size() - arguments.size();
  const int device = place_of(op, *stack, first);
  c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)));
  Stream& stream = Streams::get().current(device);
  bool fresh = false;  // a result is none of the arguments
  for (const auto& result : returns) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !result.alias_info() || result.alias_info()->isWrite(), short_name(op),
        " makes a view, which the simulated device does not know");
    fresh |= !result.alias_info();
  }
  bool seeded = !op.hasTag(at::Tag::nondeterministic_seeded);
  for (const auto& argument : arguments) seeded |= is_generator(argument);
  TORCH_CHECK_NOT_IMPLEMENTED(
      seeded, short_name(op), " draws random numbers, but takes no generator; the simulated device does not know it");

  // 1. Shapes of the results, and errors that the caller has made.
  bool masked = false;  // an index by a mask: how much it selects is not known
  if (takes_host_tensors(schema.name()))
    for (size_t i = 0; i < arguments.size(); i++)
      each_tensor((*stack)[first + i], [&](at::Tensor& tensor) {
        masked |= i > 0 && tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
      });
  // Operators of indices are tagged as if each index were a mask.
  bool known = takes_host_tensors(schema.name()) ? !masked : knows_shapes(op);
  Stack shapes;
  if (known) {
    for (size_t i = 0; i < arguments.size(); i++) {
      c10::IValue value = (*stack)[first + i];
      bool out = arguments[i].is_out();
      each_tensor(value, [&](at::Tensor& tensor) { tensor = out && on_device(tensor) ? empty_meta(tensor) : on_meta(tensor); });
      if (is_device(value)) value = c10::Device(c10::DeviceType::Meta);
      if (is_generator(arguments[i])) value = c10::IValue();
      shapes.push_back(std::move(value));
    }
    Stack kept;
    for (size_t i = 0; i < arguments.size(); i++)
      if (writes(arguments[i])) kept.push_back(shapes[i]);
    BelowEverything below;
    try {
      op.callBoxed(&shapes);
    } catch (const c10::NotImplementedError&) {
      known = false;
    }
    size_t next = 0;
    for (size_t i = 0; known && i < arguments.size(); i++) {  // results that the caller gives are resized as torch does it
      if (!writes(arguments[i])) continue;
      const c10::IValue& shaped = kept[next++];
      const c10::IValue& given = (*stack)[first + i];
      if (arguments[i].is_out() && shaped.isTensor() && on_device(given.toTensor()) &&
          shaped.toTensor().sizes() != given.toTensor().sizes())
        at::native::resize_output(given.toTensor(), shaped.toTensor().sizes());
    }
  }
  bool later =
      known || (!masked && !fresh && (!returns.empty() || !op.hasTag(at::Tag::data_dependent_output)));

  // 2. The same call over the memory that tasks see.
  Stack call;
  std::vector<Span> spans;
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue value = (*stack)[first + i];
    bool written = writes(arguments[i]);
    each_tensor(value, [&](at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!on_device(tensor)) {
        if (later) tensor = tensor.clone();  // the host may change it before the task runs
        return;
      }
      if (!(written && arguments[i].is_out())) spans.push_back(span_of(tensor, false));
      if (written) spans.push_back(span_of(tensor, true));
      tensor = for_tasks(tensor);
    });
    if (is_device(value)) value = c10::Device(c10::DeviceType::CPU);
    if (is_generator(arguments[i])) value = Generator::for_task(value.isNone() ? std::nullopt : std::optional(value.toGenerator()), device);
    call.push_back(std::move(value));
  }

  // 3. Results, and the task.
  Stack results;
  auto place = here(short_name(op));
  if (later) {
    Stack targets;
    for (size_t i = 0; i < returns.size(); i++) {
      if (returns[i].alias_info()) {
        results.push_back(written_argument(schema, returns[i], *stack, first));
        targets.emplace_back();
        continue;
      }
      c10::IValue value = shapes.at(shapes.size() - returns.size() + i);
      each_tensor(value, [&](at::Tensor& tensor) {
        if (tensor.defined())
          tensor = at::empty_strided(
              tensor.sizes(), tensor.strides(),
              at::TensorOptions(c10::Device(c10::DeviceType::PrivateUse1, device)).dtype(tensor.dtype()));
      });
      results.push_back(value);
      each_tensor(value, [&](at::Tensor& tensor) {
        if (!tensor.defined()) return;
        spans.push_back(span_of(tensor, true));
        tensor = for_tasks(tensor);
      });
      targets.push_back(std::move(value));
    }
    auto task = [op, call = std::move(call), targets = std::move(targets)]() mutable {
      op.callBoxed(&call);
      for (size_t i = 0; i < targets.size(); i++) {
        if (targets[i].isTensor()) {
          at::Tensor to = targets[i].toTensor();
          copy_result(op, to, call[i].toTensor());
        } else if (targets[i].isTensorList()) {
          auto to = targets[i].toTensorVector();
          auto from = call[i].toTensorVector();
          for (size_t j = 0; j < to.size(); j++) copy_result(op, to[j], from.at(j));
        }
      }
    };
    stream.submit(
        [task = std::move(task), place]() mutable {
          try {
            task();
          } catch (const std::exception& error) {
            throw std::runtime_error(std::string(error.what()) + "\nQueued: " + place->text());
          }
        },
        spans, place);
  } else {
    counts().waited_for++;
    if (!masked && !op.hasTag(at::Tag::data_dependent_output) && !op.hasTag(at::Tag::dynamic_output_shape)) {
      std::lock_guard<std::mutex> lock(waiting_mutex);
      waiting[short_name(op)]++;
    }
    std::exception_ptr error;
    stream.submit(
        [&] {
          try {
            op.callBoxed(&call);
          } catch (...) {
            error = std::current_exception();
          }
        },
        spans, place);
    stream.synchronize();
    if (error) std::rethrow_exception(error);
    for (size_t i = 0; i < returns.size(); i++) {
      c10::IValue value = call[i];
      if (returns[i].alias_info()) {
        value = written_argument(schema, returns[i], *stack, first);
      } else {
        each_tensor(value, [&](at::Tensor& tensor) {
          if (tensor.defined()) tensor = tensor.to(c10::Device(c10::DeviceType::PrivateUse1, device));
        });
      }
      results.push_back(std::move(value));
    }
  }
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
  Races::get().raise();
}

// ---- memory and views

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &Allocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &Allocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) { return at::native::set_tensor_(tensor, source); }

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  int64_t size = source.nbytes() / tensor.dtype().itemsize();
  return at::cpu::set_(tensor, std::move(source), 0, {size}, {1});
}

at::Tensor& set_storage_strided(
    at::Tensor& tensor, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(tensor, std::move(source), offset, size, stride);
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, Allocator::get().allocate(0), &Allocator::get(), true);
  return at::cpu::set_(tensor, c10::Storage(std::move(storage)), 0, {0}, {1});
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Allocator::get().recordStream(tensor.storage().data_ptr(), stream);
}

// May `tensor.data = other` be done? Between host and device it can on CUDA; a device that says nothing about it cannot.
bool compatible_for_set_data(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.layout() == at::kStrided && other.layout() == at::kStrided &&
      (set_data_across_devices || tensor.device().type() == other.device().type());
}

// ---- copies

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  Races::get().raise();
  Streams::get().raise_failure();
  const bool from_device = on_device(source), to_device = on_device(target);
  const c10::Device where = to_device && !from_device ? target.device() : source.device();
  Stream& stream = Streams::get().current(where.index());
  auto place = here("copy");
  if (from_device && to_device) {
    bool two = source.device() != target.device();
    Stream* other = two ? &Streams::get().current(target.device().index()) : nullptr;
    if (two) stream.wait_for(*other);
    stream.submit(
        [to = for_tasks(target), from = for_tasks(source)]() mutable { to.copy_(from); },
        {span_of(source, false), span_of(target, true)}, place);
    if (two) other->wait_for(stream);
    Races::get().raise();
    return target;
  }
  // What the host gives or takes: as a device does it, another layout or type goes through pageable memory.
  const at::Tensor given = from_device ? target : source;
  const at::Tensor& device_side = from_device ? source : target;
  at::Tensor host = given;
  if (!same_layout(source.expand(target.sizes()), target)) {
    if (to_device) host = source.to(target.scalar_type()).expand(target.sizes()).contiguous();
    else host = at::empty(target.sizes(), target.options().dtype(source.scalar_type()));
  }
  const bool pinned = Pinned::get().has(host.const_data_ptr());
  const bool asynchronous = non_blocking && pinned;
  const size_t bytes = device_side.nbytes();
  at::Tensor host_side = for_tasks(host), device_bytes = for_tasks(device_side);
  uint64_t position = stream.submit(
      [to = to_device ? device_bytes : host_side, from = to_device ? host_side : device_bytes]() mutable { to.copy_(from); },
      {span_of(device_side, to_device)}, place);
  if (asynchronous) {
    Span held = span_of(host, false);
    Pinned::get().hold(
        reinterpret_cast<void*>(held.begin), held.end - held.begin, host.storage().data_ptr().get_context(), stream,
        position, from_device, place);
    (to_device ? counts().to_device_async : counts().to_host_async) += bytes;
  } else {
    stream.synchronize();
    (to_device ? counts().to_device_sync : counts().to_host_sync) += bytes;
    Streams::get().raise_failure();
    if (from_device && !host.is_same(target)) target.copy_(host);
  }
  Races::get().raise();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  at::Tensor host = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  copy_from(tensor, host, false);
  return host.item();
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  if (p == 1) return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (1 / (1 - p)), mask};
}

}  // namespace

at::Tensor for_tasks(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto bytes = c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      at::DataPtr(Memory::for_tasks(storage.data()), c10::Device(c10::DeviceType::CPU)), nullptr, false);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

Span span_of(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return {0, 0, write};
  auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.itemsize(), write};
}

std::atomic<bool> set_data_across_devices{true};

Counts& counts() {
  static Counts counts;
  return counts;
}

std::map<std::string, int64_t> waiting_operators() {
  std::lock_guard<std::mutex> lock(waiting_mutex);
  return waiting;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_strided);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible_for_set_data);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("native_dropout", native_dropout);
  // The CPU chooses among several kernels here, of which a device has none.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators of which torch has a kernel of the CPU and, for devices without a kernel, a formula of others: the kernel it is.
void register_kernels_of_the_cpu() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    const auto& returns = op->schema().returns();
    if (std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
          return result.alias_info() && !result.alias_info()->isWrite();
        }))
      continue;
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace simulated
