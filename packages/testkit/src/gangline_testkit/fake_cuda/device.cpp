// A CUDA device in host memory, for a CPU build of torch: tensors say that they are on cuda:0, and CPU kernels compute.
//
// Every operator without a kernel of its own runs here on CPU tensors that share the memory of its arguments, and its
// new results become CUDA tensors. Tensors of both devices in one operator are an error, as on a GPU. Fresh memory
// holds NaN. Memory that is pinned is registered, so `is_pinned` is right.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

using at::Tensor;
using c10::DeviceType;
using c10::IValue;

namespace {

const c10::Device kDevice(DeviceType::CUDA, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// ---- memory ----

void* fresh(size_t bytes) {
  if (!bytes) return nullptr;
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes)) throw std::bad_alloc();
  std::memset(memory, 0xff, bytes);  // NaN in every floating-point type
  return memory;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = fresh(bytes);
    return {memory, memory, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct PinnedMemory final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::map<const char*, size_t> ranges;  // start -> bytes
  static void unpin(void* memory) {
    std::lock_guard<std::mutex> held(mutex);
    ranges.erase(static_cast<const char*>(memory));
    std::free(memory);
  }
  static void add(const void* memory, size_t bytes) {
    std::lock_guard<std::mutex> held(mutex);
    ranges[static_cast<const char*>(memory)] = bytes;
  }
  static void remove(const void* memory) {
    std::lock_guard<std::mutex> held(mutex);
    ranges.erase(static_cast<const char*>(memory));
  }
  static bool contains(const void* memory) {
    std::lock_guard<std::mutex> held(mutex);
    auto after = ranges.upper_bound(static_cast<const char*>(memory));
    if (after == ranges.begin()) return false;
    --after;
    return static_cast<const char*>(memory) < after->first + after->second;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = fresh(bytes);
    if (memory) add(memory, bytes);
    return {memory, memory, &unpin, c10::Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

// ---- tensors ----

void drop(void* storage) { delete static_cast<c10::Storage*>(storage); }

// Return a storage with the same memory that belongs to another device and keeps the original alive.
c10::Storage alias(const c10::Storage& of, c10::Device device, c10::Allocator* allocator) {
  auto* kept = new c10::Storage(of);
  c10::DataPtr memory(of.mutable_data(), kept, &drop, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), of.nbytes(), std::move(memory), allocator, /*resizable=*/true);
}

Tensor on_storage(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& shaped) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, shaped.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shaped.sizes(), shaped.strides(), shaped.storage_offset());
  return made;
}

bool on_device(const Tensor& x) { return x.defined() && x.device().type() == DeviceType::CUDA; }

Tensor to_host(const Tensor& x) {
  c10::Storage shared = alias(x.storage(), c10::Device(DeviceType::CPU), c10::GetCPUAllocator());
  return on_storage(std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), x);
}

Tensor to_device(const Tensor& x) { return on_storage(alias(x.storage(), kDevice, &device_memory), kKeys, x); }

// ---- operators without a kernel of their own ----

// Arguments of a call, on the host, and what is needed to bring its results back.
struct Call {
  const c10::FunctionSchema& schema;
  std::vector<std::pair<Tensor, Tensor>> aliases;  // (host, device)
  const Tensor* stray = nullptr;                   // a tensor of one or more dimensions on the host
  bool device = false;                             // whether the results belong on the device

  Tensor enter(const Tensor& x) {
    if (!x.defined()) return x;
    if (!on_device(x)) {
      if (x.dim() > 0) stray = &x;
      return x;
    }
    device = true;
    for (auto& [host, ours] : aliases)
      if (ours.is_same(x)) return host;
    aliases.emplace_back(to_host(x), x);
    return aliases.back().first;
  }

  IValue enter(const IValue& value) {
    if (value.isTensor()) return enter(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> entered;
      for (const Tensor& x : value.toTensorVector()) entered.push_back(enter(x));
      return entered;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> entered;
      for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
        entered.push_back(x ? std::optional<Tensor>(enter(*x)) : std::nullopt);
      return entered;
    }
    if (value.isDevice() && value.toDevice().type() == DeviceType::CUDA) {
      device = true;
      return c10::Device(DeviceType::CPU);
    }
    return value;
  }

  Tensor leave(const Tensor& x) const {
    if (!x.defined() || !device) return x;
    for (const auto& [host, ours] : aliases) {
      if (x.is_same(host)) return ours;
      if (x.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return on_storage(ours.storage(), kKeys, x);
    }
    return to_device(x);
  }

  // Give the arguments that the operator resized (results of `out=`) their new memory and shape.
  void keep_resized() const {
    for (const auto& [host, ours] : aliases) {
      if (host.storage().data() != ours.storage().data()) {
        c10::Storage moved = alias(host.storage(), kDevice, &device_memory);
        ours.storage().set_nbytes(moved.nbytes());
        ours.storage().set_data_ptr(std::move(moved.mutable_data_ptr()));
      }
      if (host.sizes() != ours.sizes() || host.strides() != ours.strides())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  IValue leave(const IValue& value) const {
    if (value.isTensor()) return leave(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> left;
      for (const Tensor& x : value.toTensorVector()) left.push_back(leave(x));
      return left;
    }
    return value;
  }
};

// Operators that take tensors of both devices on a GPU.
bool mixes(const std::string& name) { return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_"; }

void compute_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call call{op.schema()};
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = call.enter((*stack)[i]);
  TORCH_CHECK(
      !call.stray || !call.device || mixes(op.schema().name()),
      "Expected all tensors to be on the same device, but ", op.schema().operator_name(), " got a tensor of shape ",
      call.stray ? call.stray->sizes() : c10::IntArrayRef(), " on cpu beside tensors on cuda:0");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.keep_resized();
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = call.leave((*stack)[i]);
}

// ---- operators with kernels of their own ----

Tensor empty(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, &device_memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& from, bool) {
  Tensor to = on_device(self) ? to_host(self) : self;
  to.copy_(on_device(from) ? to_host(from) : from);
  return self;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto memory = device_memory.allocate(bytes);
  if (bytes && storage.nbytes()) std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage from, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(from));
  std::vector<int64_t> dense(size.size(), 1);
  for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i) dense[i] = dense[i + 1] * size[i + 1];
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride.empty() ? c10::IntArrayRef(dense) : stride, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(from.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return self;
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

// For kernels in Python: the memory of a device tensor as a CPU tensor, and back.
Tensor host(const Tensor& x) { return on_device(x) ? to_host(x) : x; }
Tensor device(const Tensor& x) { return on_device(x) ? x : to_device(x); }
TORCH_LIBRARY(fake_cuda, m) {
  m.def("host(Tensor x) -> Tensor", {});
  m.def("device(Tensor x) -> Tensor", {});
}
TORCH_LIBRARY_IMPL(fake_cuda, CUDA, m) { m.impl("host", host); m.impl("device", device); }
TORCH_LIBRARY_IMPL(fake_cuda, CPU, m) { m.impl("host", host); m.impl("device", device); }

// ---- what torch asks of a device ----

using Guard = c10::impl::FakeGuardImpl<DeviceType::CUDA>;
Guard guard;
const bool registered = [] {
  c10::impl::registerDeviceGuard(DeviceType::CUDA, &guard);
  c10::SetAllocator(DeviceType::CUDA, &device_memory);
  return true;
}();

}  // namespace

namespace at {
namespace {
struct CUDAHooks final : CUDAHooksInterface {  // REGISTER_CUDA_HOOKS requires this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* memory) const override { return PinnedMemory::contains(memory); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace
}  // namespace at

extern "C" {
void fake_cuda_use_stream(long id) { guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, kDevice, id)); }
void fake_cuda_pin(void* memory, size_t bytes) { PinnedMemory::add(memory, bytes); }
void fake_cuda_unpin(void* memory) { PinnedMemory::remove(memory); }
void fake_cuda_resize(void* storage, size_t bytes) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  resize_storage(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl)), bytes);
}
}
