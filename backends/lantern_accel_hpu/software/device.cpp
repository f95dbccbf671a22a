// The software HPU: torch's own dispatch key HPU, with host memory and the CPU's kernels behind it.
//
// It has what a bridge to a real device has: an allocator, a device guard, streams, the few operators that
// make and view storage, and for all else a boxed kernel. That kernel refuses what a device refuses
// (tensors of another device, views without a kernel), counts the operator and runs it on the CPU
// over the same memory.
// For checking correctness only: nothing here says anything about a Gaudi's speed.

#include "card.h"
#include "streams.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/min.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <unordered_set>

namespace {

// --- which kernels ran ----------------------------------------------------------------------

std::mutex counting;
std::map<std::string, int64_t> kernels;

void count(const std::string& name) {
  const std::lock_guard<std::mutex> one(counting);
  ++kernels[name];
}

// A recipe is compiled for an operator, the shapes and dtypes of its tensors, and its numbers.
std::unordered_set<std::string> recipes;
int64_t hits = 0, misses = 0;

void describe(std::ostringstream& out, const c10::IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined()) out << tensor.scalar_type() << tensor.sizes();
  } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
    for (const c10::IValue one : value.toListRef()) describe(out, one);
  } else if (value.isInt()) {
    out << value.toInt();
  } else if (value.isDouble()) {
    out << value.toDouble();
  } else if (value.isBool()) {
    out << value.toBool();
  } else if (value.isString()) {
    out << value.toStringRef();
  }
  out << ';';
}

void recipe(const std::string& name, const torch::jit::Stack& stack, size_t first) {
  std::ostringstream key;
  key << name;
  for (size_t i = first; i < stack.size(); ++i) describe(key, stack[i]);
  const std::lock_guard<std::mutex> one(counting);
  ++(recipes.insert(key.str()).second ? misses : hits);
}

// Integers are computed in 32 bits: what is wider wraps, unless PT_ENABLE_INT64_SUPPORT asks for 64.
bool narrows() {
  const char* asked = std::getenv("PT_ENABLE_INT64_SUPPORT");
  return asked == nullptr || std::string(asked) == "0";
}

void narrow(const at::Tensor& on_host) {
  if (on_host.defined() && on_host.scalar_type() == at::kLong && on_host.numel() && narrows())
    on_host.copy_(on_host.to(at::kInt));
}

// --- operators that make, view and copy storage ---------------------------------------------

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  count("aten::empty.memory_format");
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, ON_HPU, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  count("aten::empty_strided");
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, ON_HPU,
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  count("aten::resize_");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t need = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  const auto& storage = self.storage();
  if (need > storage.nbytes()) {
    auto wider = memory.allocate(need);
    if (storage.nbytes() > 0) std::memcpy(wider.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(wider));
    storage.set_nbytes(need);
  }
  return self;
}

at::Tensor host(const at::Tensor& device) {
  return at::for_blob(device.data_ptr(), device.sizes())
      .strides(device.strides())
      .options(device.options().device(at::kCPU))
      .make_tensor();
}

bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == HPU; }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  count("aten::_copy_from");
  if (non_blocking && ours(from) && !ours(to) && to.numel() > 0) {
    copy_to_host_later(host(from), from, to);
    return to;
  }
  if (ours(to)) {
    catch_up();
  } else {
    wait_and_land(catch_up);
  }
  auto target = ours(to) ? host(to) : to;
  target.copy_(ours(from) ? host(from) : from);
  if (ours(to)) narrow(target);
  return to;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// Attention without a fused kernel: 0 is torch's plain one.
int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;
}

// --- every other operator: the CPU's kernel over the same memory ------------------------------

struct Lent {
  at::Tensor device, host;
  bool written = false;
};

at::Tensor lend(const at::Tensor& tensor, std::vector<Lent>& lent, const char* name) {
  if (!tensor.defined()) return tensor;
  if (!ours(tensor)) {
    TORCH_CHECK(
        tensor.dim() == 0, "software HPU: ", name, " got a tensor on ", tensor.device(),
        " beside tensors on hpu:0; move it with .to(device)");
    return tensor;  // torch lets a number be a tensor of the host
  }
  // What is empty may be an output that the operator sizes.
  lent.push_back({tensor, tensor.numel() ? host(tensor) : at::empty(
      tensor.sizes(), tensor.options().device(at::kCPU)), false});
  return lent.back().host;
}

at::Tensor give_back(const at::Tensor& result, const std::vector<Lent>& lent) {
  if (!result.defined() || ours(result)) return result;
  for (const auto& one : lent)
    if (one.host.is_same(result)) return one.device;
  auto out = at::empty_strided(
      result.sizes(), result.strides(), result.options().device(DEVICE));
  if (result.numel() > 0) {
    host(out).copy_(result);
    narrow(host(out));
  }
  if (result.unsafeGetTensorImpl()->is_wrapped_number())
    out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

// No test of the vendor's has a remainder of a negative integer: its sign is anyone's guess.
void refuse_untested(const std::string& name, const torch::jit::Stack& stack, size_t first) {
  if (name.rfind("aten::remainder", 0) != 0 || !stack[first].isTensor()) return;
  const auto& given = stack[first].toTensor();
  if (!at::isIntegralType(given.scalar_type(), /*includeBool=*/false) || !given.numel()) return;
  TORCH_CHECK(
      given.min().item<int64_t>() >= 0, "software HPU: ", name, " of a negative integer, whose sign ",
      "nothing tells; add the divisor first");
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  count(name);
  catch_up();
  for (const auto& result : schema.returns())
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.alias_info() == nullptr || result.alias_info()->isWrite(),
        "software HPU: the view ", name, " has no kernel");
  std::vector<Lent> lent;
  const size_t first = stack->size() - schema.arguments().size();
  recipe(name, *stack, first);
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const size_t before = lent.size();
    if (value.isTensor()) {
      value = lend(value.toTensor(), lent, name.c_str());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& one : value.toTensorVector()) all.push_back(lend(one, lent, name.c_str()));
      value = all;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& one : value.toOptionalTensorVector())
        all.push_back(one ? std::optional<at::Tensor>(lend(*one, lent, name.c_str())) : one);
      value = all;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
    const auto* alias = schema.arguments()[i - first].alias_info();
    for (size_t one = before; one < lent.size(); ++one)
      lent[one].written = alias != nullptr && alias->isWrite();
  }
  refuse_untested(name, *stack, first);
  op.redispatchBoxed(ON_CPU, stack);
  for (const auto& one : lent)
    if (one.written) narrow(one.host);
  for (const auto& one : lent) {
    if (one.device.numel() || !one.host.numel()) continue;
    one.device.resize_(one.host.sizes());
    host(one.device).copy_(one.host);
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = give_back(value.toTensor(), lent);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& one : value.toTensorVector()) all.push_back(give_back(one, lent));
      value = all;
    }
  }
}

// Torch asks devices other than its own for this one by name.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const char* name = "aten::convolution_overrideable";
  count(name);
  std::vector<Lent> lent;
  const auto x = lend(input, lent, name), w = lend(weight, lent, name);
  const auto b = bias ? std::optional<at::Tensor>(lend(*bias, lent, name)) : bias;
  return give_back(
      at::convolution_symint(x, w, b, stride, padding, dilation, transposed, output_padding, groups),
      lent);
}

// The bridge writes a bool's value as a float, and the kernel, of 8-bit integers, reads its lowest byte: that
// of 1.0f is 0 (FillPadParamsValue in constant_pad_gen.cpp, releases 1.19 and 1.24).
at::Tensor pad(const at::Tensor& self, c10::SymIntArrayRef sizes, const at::Scalar& value) {
  const char* name = "aten::constant_pad_nd";
  count(name);
  catch_up();
  std::vector<Lent> lent;
  const auto x = lend(self, lent, name);
  at::Scalar read = value;
  if (self.scalar_type() == at::kBool) {
    const float written = value.to<float>();
    uint8_t lowest;
    std::memcpy(&lowest, &written, 1);
    read = lowest != 0;
  }
  return give_back(at::constant_pad_nd_symint(x, sizes, read), lent);
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("convolution_overrideable", convolution);
  m.impl("constant_pad_nd", pad);
}

// --- what the Python side reads -----------------------------------------------------------------

TORCH_LIBRARY(lantern_software_hpu, m) {
  m.def("new_stream() -> int", [] { return new_stream(); });
  m.def("set_stream(int id) -> int", [](int64_t id) {
    stream_of(id);
    const auto before = current;
    current = id;
    return before;
  });
  m.def("record(int stream) -> int", [](int64_t id) { return stream_of(id).give([] {}); });
  m.def("wait_event(int stream, int of, int number) -> ()", [](int64_t id, int64_t of, int64_t n) {
    if (id != of) stream_of(id).give([of, n] { stream_of(of).wait(n); });
  });
  m.def("synchronize(int of, int number) -> ()", [](int64_t of, int64_t number) {
    auto& one = stream_of(of);
    wait_and_land([&] { one.wait(number < 0 ? one.given() : number); });
  });
  m.def("synchronize_all() -> ()", [] { wait_for_all(); });
  m.def("fail_later(str text, bool at_launch, int threads) -> ()",
        [](const std::string& text, bool at_launch, int64_t threads) {
          const std::lock_guard<std::mutex> one(failing);
          while (static_cast<int64_t>(late.size()) < threads) late.push_back({text, at_launch});
        });
  m.def("launch() -> ()", [] { raise_late(true); });
  m.def("memory() -> int[]", [] { return std::vector<int64_t>{in_use, peak, limit}; });
  m.def("reset_peak() -> ()", [] { peak = in_use.load(); });
  m.def("acquire() -> int", [] { return acquire(); });
  m.def("acquired() -> bool", [] { return held >= 0; });
  m.def("recipes() -> int[]", [] {
    const std::lock_guard<std::mutex> one(counting);
    return std::vector<int64_t>{misses, hits};
  });
  m.def("set_limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("kernels() -> Dict(str, int)", [] {
    const std::lock_guard<std::mutex> one(counting);
    c10::Dict<std::string, int64_t> found;
    for (const auto& [name, times] : kernels) found.insert(name, times);
    return found;
  });
  m.def("reset_kernels() -> ()", [] {
    const std::lock_guard<std::mutex> one(counting);
    kernels.clear();
  });
}

struct Register {
  Register() { c10::SetAllocator(HPU, &memory); }
} registered;

}  // namespace
