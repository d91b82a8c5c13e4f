#include "backend.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "operators.h"

namespace simulated {

namespace {

using c10::Device;
using c10::DeviceIndex;

Device device_at(int index) { return Device(c10::DeviceType::PrivateUse1, static_cast<DeviceIndex>(index)); }
int index_of(Device device) { return device.has_index() ? device.index() : Streams::device(); }

void set_device(int index) {
  TORCH_CHECK(
      index >= 0 && index < Streams::get().device_count, "invalid device ordinal ", index, ": there are ",
      Streams::get().device_count, " devices");
  Streams::device() = index;
}

Stream& stream_of(const c10::Stream& stream) { return Streams::get().at(stream.device_index(), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    if (device.has_index()) set_device(device.index());
    return before;
  }
  Device getDevice() const override { return device_at(Streams::device()); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) Streams::device() = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(Streams::get().device_count); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  static c10::Stream packed(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device_at(device), id); }
  static c10::Stream packed(const Stream& stream) { return packed(stream.device, stream.id); }
  c10::Stream getStream(Device device) const override {
    int index = index_of(device);
    return packed(index, Streams::current_id(index));
  }
  c10::Stream getDefaultStream(Device device) const override { return packed(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return packed(Streams::get().from_pool(index_of(device)));
  }
  c10::Stream getNewStream(Device device, int) const override { return packed(Streams::get().from_pool(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = stream.device_index();
    auto before = packed(device, Streams::current_id(device));
    Streams::current_id(device) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Streams::get().synchronizations++;
    stream_of(stream).synchronize();
    raise();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Streams::get().synchronizations++;
    Streams::get().synchronize(device);
    raise();
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Event*>(event)->block(stream_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Streams::get().synchronizations++;
    static_cast<Event*>(event)->synchronize();
    raise();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before the time between them is asked for");
    return static_cast<Event*>(first)->milliseconds_until(*static_cast<Event*>(second));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    Allocator::get().recordStream(pointer, stream);
  }

  static void raise() {
    Races::get().raise();
    Streams::get().raise_failure();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Streams::get().device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return Streams::get().used(); }
  void init() const override {}
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(Streams::get().device_count); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(Streams::device()); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return Pinned::get().has(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::get(); }
  Device getDeviceFromPtr(void* pointer) const override {
    int device = Memory::device_of(pointer);
    TORCH_CHECK(device >= 0, "no memory of the device is at this address");
    return device_at(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? Streams::device() : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(static_cast<DeviceIndex>(device < 0 ? Streams::device() : device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = Allocator::get().allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) Allocator::get().copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

uint64_t mixed(uint64_t seed, uint64_t offset) {  // splitmix64 (Steele, Lea and Flood, 2014)
  uint64_t value = seed + 0x9E3779B97F4A7C15ull * (offset + 1);
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

}  // namespace

Generator::Generator(DeviceIndex device)
    : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void Generator::set_offset(uint64_t offset) { offset_ = offset; }
uint64_t Generator::get_offset() const { return offset_; }
uint64_t Generator::current_seed() const { return seed_; }

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::empty({16}, at::kByte);
  auto* words = reinterpret_cast<uint64_t*>(state.mutable_data_ptr<uint8_t>());
  words[0] = seed_;
  words[1] = offset_;
  return state.getIntrusivePtr();
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(
      state.is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.numel() == 16 && state.is_contiguous(),
      "the random state of the simulated device has 16 bytes");
  auto* words = static_cast<const uint64_t*>(state.data());
  seed_ = words[0];
  offset_ = words[1];
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device_.index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator Generator::for_task(std::optional<at::Generator> given, int device) {
  at::Generator from = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      from.device() == device_at(device), "Expected a '", device_at(device), "' generator device but found '", from.device(),
      "'");
  auto* generator = from.get<Generator>();
  std::lock_guard<std::mutex> lock(generator->mutex_);
  return at::detail::createCPUGenerator(mixed(generator->seed_, generator->offset_++));
}

at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < kMostDevices; i++) all->push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i)));
    return all;
  }();
  return generators->at(device);
}

void register_backend() {
  static auto* hooks = new Hooks;
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &Allocator::get());
  at::RegisterPrivateUse1HooksInterface(hooks);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &Pinned::get(), 1);
}

}  // namespace simulated
