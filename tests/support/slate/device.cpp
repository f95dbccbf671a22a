// A vendor's device as a torch plug-in makes one: PrivateUse1, called "slate", with graphs.
//
// It has an allocator of host memory, a device guard, the few operators that make and view storage, and for
// all else a boxed kernel that runs the CPU's over the same memory. Its graphs are those of a real device: a
// capture runs nothing, a value that the host reads ends it, and a replay runs what was recorded on the same
// memory.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
const c10::DispatchKeySet ON_CPU(c10::DispatchKey::CPU), HERE(c10::DispatchKey::PrivateUse1);
int64_t replays = 0;
bool stale = false;  // a driver that replays a graph once and does nothing from then on
int64_t stream = 0;

// --- memory, guard ----------------------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
} memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, 7);
  }
  c10::Stream exchangeStream(c10::Stream other) const noexcept override {
    const auto before = getStream(DEVICE);
    stream = other.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
} hooks;

// --- graphs -----------------------------------------------------------------------------------

using Record = std::vector<std::function<void()>>;
Record* recording = nullptr;
Record undo;  // a capture must leave memory as it was

at::Tensor host(const at::Tensor& device) {
  return at::for_blob(device.data_ptr(), device.sizes())
      .strides(device.strides())
      .options(device.options().device(at::kCPU))
      .make_tensor();
}

void keep(const at::Tensor& written) {
  if (written.numel())
    undo.push_back([written, was = host(written).clone()] { host(written).copy_(was); });
}

struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs& = {}) {}
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    TORCH_CHECK(recording == nullptr, "slate: a graph is being captured");
    TORCH_CHECK(stream != 0, "slate: the default stream cannot be captured");
    record_.clear();
    recording = &record_;
  }
  void capture_end() override {
    TORCH_CHECK(recording == &record_, "slate: this graph captures nothing");
    recording = nullptr;
    const at::AutoDispatchBelowADInplaceOrView below;
    for (auto one = undo.rbegin(); one != undo.rend(); ++one) (*one)();
    undo.clear();
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(recording == nullptr, "slate: a graph is being captured");
    ++replays;
    if (stale && replayed_++) return;
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& one : record_) one();
  }
  void reset() override { record_.clear(); }
  at::MempoolId_t pool() const override { return {0, 1}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Record record_;
  int64_t replayed_ = 0;
};

// --- operators --------------------------------------------------------------------------------

bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, HERE, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, HERE,
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
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

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (recording != nullptr) {
    TORCH_CHECK(
        ours(from) && ours(to), "slate: the host may not read or write during a capture");
    recording->push_back([from, to] { host(to).copy_(host(from)); });
    keep(to);
  }
  (ours(to) ? host(to) : to).copy_(ours(from) ? host(from) : from);
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

int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;
}

// Tensors of the device as the host sees them.
struct Lent {
  std::vector<at::Tensor> device, host_side;

  at::Tensor lend(const at::Tensor& tensor) {
    if (!ours(tensor)) {
      TORCH_CHECK(!tensor.defined() || tensor.dim() == 0, "slate: a tensor of the host");
      return tensor;
    }
    device.push_back(tensor);
    // What is empty may be an output that the operator sizes.
    auto seen = tensor.numel() ? host(tensor)
                               : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    host_side.push_back(seen);
    return host_side.back();
  }

  c10::IValue lend(const c10::IValue& value) {
    if (value.isTensor()) return lend(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& one : value.toTensorVector()) all.push_back(lend(one));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& one : value.toOptionalTensorVector())
        all.push_back(one ? std::optional<at::Tensor>(lend(*one)) : one);
      return all;
    }
    return value.isDevice() ? c10::IValue(c10::Device(at::kCPU)) : value;
  }

  at::Tensor give_back(const at::Tensor& result) {
    if (!result.defined() || ours(result)) return result;
    for (size_t i = 0; i < device.size(); ++i)
      if (host_side[i].is_same(result)) return device[i];
    auto out = at::empty_strided(result.sizes(), result.strides(), result.options().device(DEVICE));
    if (result.numel() > 0) host(out).copy_(result);
    if (result.unsafeGetTensorImpl()->is_wrapped_number())
      out.unsafeGetTensorImpl()->set_wrapped_number(true);
    return out;
  }
};

std::vector<at::Tensor> tensors(const torch::jit::Stack& results) {
  std::vector<at::Tensor> all;
  for (const auto& value : results) {
    if (value.isTensor()) all.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& one : value.toTensorVector()) all.push_back(one);
  }
  return all;
}

torch::jit::Stack run(
    const c10::OperatorHandle& op, const torch::jit::Stack& given, Lent& lent) {
  torch::jit::Stack stack;
  for (const auto& value : given) stack.push_back(lent.lend(value));
  op.redispatchBoxed(ON_CPU, &stack);
  for (size_t i = 0; i < lent.device.size(); ++i) {
    const auto& made = lent.host_side[i];
    if (lent.device[i].numel() || !made.numel()) continue;
    lent.device[i].resize_(made.sizes());
    host(lent.device[i]).copy_(made);
  }
  return stack;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const torch::jit::Stack given(stack->end() - count, stack->end());
  TORCH_CHECK(
      recording == nullptr || op.operator_name().name != "aten::_local_scalar_dense",
      "slate: the host may not read during a capture");
  if (recording != nullptr)
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = op.schema().arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite() && given[i].isTensor()) keep(given[i].toTensor());
    }
  Lent lent;
  auto results = run(op, given, lent);
  torch::jit::drop(*stack, count);
  torch::jit::Stack back;
  for (auto& value : results) {
    if (value.isTensor()) {
      value = lent.give_back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& one : value.toTensorVector()) all.push_back(lent.give_back(one));
      value = all;
    }
    stack->push_back(value);
    back.push_back(value);
  }
  if (recording == nullptr) return;
  recording->push_back([op, given, kept = tensors(back)] {
    Lent now;
    const auto made = tensors(run(op, given, now));
    for (size_t i = 0; i < kept.size(); ++i)
      if (kept[i].defined() && kept[i].data_ptr() != made[i].data_ptr()) host(kept[i]).copy_(made[i]);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_fused_sdp_choice", sdp_choice);
}

TORCH_LIBRARY(slate, m) {
  m.def("replays() -> int", [] { return replays; });
  m.def("with_graphs(bool is_stale) -> ()", [](bool is_stale) {
    stale = is_stale;
    at::GraphImplRegistry()->Register(
        "SLATE", [](const at::GraphImplArgs& args) -> std::unique_ptr<at::GraphImplInterface> {
          return std::make_unique<Graph>(args);
        });
  });
}

struct Register {
  Register() {
    c10::SetAllocator(KIND, &memory);
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
} registered;

}  // namespace
