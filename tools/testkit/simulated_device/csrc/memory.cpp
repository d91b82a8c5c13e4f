#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

namespace simulated {

namespace {

constexpr size_t kRegion = size_t(64) << 30;  // of addresses; memory is taken as it is written
constexpr size_t kPage = 4096;
constexpr size_t kBlock = 512;  // as the caching allocator of CUDA rounds

size_t rounded(size_t size, size_t to) { return (std::max<size_t>(size, 1) + to - 1) / to * to; }

struct sigaction previous_handler;

void on_fault(int signal, siginfo_t* info, void*) {
  if (Pinned::get().touched(info->si_addr)) return;  // the access is repeated, and succeeds
  int device = Memory::device_of(info->si_addr);
  if (device >= 0) {
    char text[160];
    int size = snprintf(
        text, sizeof text, "host code touched memory of simulated device %d at %p; a tensor must be copied to the host first\n",
        device, info->si_addr);
    if (write(STDERR_FILENO, text, size) < 0) _exit(139);
  }
  sigaction(SIGSEGV, &previous_handler, nullptr);  // whoever listened before sees the fault again
}

// faulthandler puts itself in front of whoever listens, so this is looked at each time.
void listen_for_faults() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
  previous_handler = now;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace

size_t AddressSpace::take(size_t size) {
  for (auto range = free_.begin(); range != free_.end(); ++range)
    if (range->second >= size) {
      size_t offset = range->first;
      size_t rest = range->second - size;
      free_.erase(range);
      if (rest) free_[offset + size] = rest;
      return offset;
    }
  return SIZE_MAX;
}

void AddressSpace::give(size_t offset, size_t size) {
  auto next = free_.upper_bound(offset);
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      free_.erase(before);
    }
  }
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    free_.erase(next);
  }
  free_[offset] = size;
}

void Region::map(const char* name, int protection) {
  file = memfd_create(name, MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kRegion) == 0, "no memory for the simulated device: ", strerror(errno));
  int flags = MAP_SHARED | MAP_NORESERVE;
  void* outside = mmap(nullptr, kRegion, protection, flags, file, 0);
  void* inside = mmap(nullptr, kRegion, PROT_READ | PROT_WRITE, flags, file, 0);
  TORCH_CHECK(outside != MAP_FAILED && inside != MAP_FAILED, "no addresses for the simulated device: ", strerror(errno));
  madvise(inside, kRegion, MADV_DONTFORK);
  if (protection == PROT_NONE) madvise(outside, kRegion, MADV_DONTDUMP);
  addresses = std::make_unique<AddressSpace>(kRegion);
  tasks = static_cast<char*>(inside);
  tensors = static_cast<char*>(outside);
}

bool Region::has(const void* pointer) const {
  auto* at = static_cast<const char*>(pointer);
  return tensors && at >= tensors && at < tensors + kRegion;
}

Memory& Memory::get() {
  static auto* memory = new Memory;
  return *memory;
}

Region& Memory::device(int device) {
  Streams::get().in_use();
  std::lock_guard<std::mutex> lock(mutex_);
  Region& region = devices_[device];
  if (!region.tensors) {
    region.map("simulated-device", PROT_NONE);
    listen_for_faults();
  }
  return region;
}

Region& Memory::pinned() {
  Streams::get().in_use();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pinned_.tensors) pinned_.map("simulated-pinned", PROT_READ | PROT_WRITE);
  return pinned_;
}

Region* Memory::find(const void* pointer) {
  for (Region& region : devices_)
    if (region.has(pointer)) return &region;
  return pinned_.has(pointer) ? &pinned_ : nullptr;
}

char* Memory::for_tasks(const void* pointer) {
  Region* region = get().find(pointer);
  auto* at = static_cast<char*>(const_cast<void*>(pointer));
  return region ? region->tasks + (at - region->tensors) : at;
}

int Memory::device_of(const void* pointer) {
  for (int device = 0; device < kMostDevices; device++)
    if (get().devices_[device].has(pointer)) return device;
  return -1;
}

void Memory::host_waited(const Clock& known) {
  Ordering::get().host_waited(known);
  Pinned::get().host_waited();
}

// ---- the device's allocator

Allocator& Allocator::get() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void Allocator::drop(void* pointer) { get().free(pointer); }

c10::DataPtr Allocator::allocate(size_t size) {
  int device = Streams::device();
  c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  if (size == 0) return {nullptr, nullptr, &Allocator::drop, where};
  Region& region = Memory::get().device(device);
  Stream& stream = Streams::get().current(device);
  check_freed(stream);
  Races::get().raise();
  auto place = here("memory for a new tensor of " + std::to_string(size) + " bytes");
  Block block;
  if (!take(size, device, stream, block)) {
    release_cached(device);
    if (!take(size, device, stream, block)) {
      std::lock_guard<std::mutex> lock(mutex_);
      stats_[device].num_ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "simulated device ", device, " is out of memory. Tried to allocate ", size, " bytes; ",
          stats_[device].reserved_bytes[0].current, " of ", capacity(device), " bytes are in use.");
    }
  }
  auto* pointer = reinterpret_cast<void*>(block.begin);
  char* bytes = Memory::for_tasks(pointer);
  stream.submit(
      [bytes, count = block.size] { memset(bytes, 0xFF, count); },
      {{block.begin, block.begin + block.size, true}}, place);
  return {pointer, pointer, &Allocator::drop, where};
}

// Takes a block for `size` bytes, from the cache of the stream or from the free memory of the device.
bool Allocator::take(size_t size, int device, Stream& stream, Block& block) {
  Region& region = Memory::get().device(device);
  std::lock_guard<std::mutex> lock(mutex_);
  reclaim();
  size_t bytes = rounded(size, kBlock);
  auto& stats = stats_[device];
  auto& cached = pool_[{&stream, bytes}];
  if (!cached.empty()) {
    block = cached.back();
    cached.pop_back();
  } else {
    bool fits = stats.reserved_bytes[0].current + static_cast<int64_t>(bytes) <= capacity(device);
    size_t offset = fits ? region.addresses->take(bytes) : SIZE_MAX;
    if (offset == SIZE_MAX) {
      stats.num_alloc_retries++;
      return false;
    }
    block = {reinterpret_cast<uintptr_t>(region.tensors + offset), bytes, 0, device, &stream, {}};
    stats.reserved_bytes[0].increase(bytes);
    stats.segment[0].increase(1);
    stats.num_device_alloc++;
  }
  block.requested = size;
  block.users.clear();
  live_[block.begin] = block;
  stats.allocated_bytes[0].increase(block.size);
  stats.active_bytes[0].increase(block.size);
  stats.requested_bytes[0].increase(size);
  stats.allocation[0].increase(1);
  stats.active[0].increase(1);
  return true;
}

void Allocator::check_freed(Stream& stream) {
  std::vector<Freed> suspects;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = unordered_.find(&stream);
    if (found == unordered_.end()) return;
    suspects = std::move(found->second);
    unordered_.erase(found);
  }
  for (const Freed& freed : suspects) {
    auto uses = Ordering::get().unordered(stream.number, freed.block.begin, freed.block.begin + freed.block.size);
    if (uses.empty()) continue;
    Races::get().add(
        "unordered access to memory: " + Ordering::get().stream_name(stream.number) +
        " frees memory that " + Ordering::get().stream_name(uses[0].stream) +
        " may still use, and gives memory away without waiting for it; use record_stream(), or let it wait.\nUsed: " +
        uses[0].place->text() + "\nFreed: " + freed.place->text());
  }
}

void Allocator::free(void* pointer) {
  if (!pointer || Streams::get().in_bad_fork()) return;
  auto place = here("the last tensor with this memory is gone");
  Block block;
  std::vector<std::pair<Stream*, uint64_t>> until;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == live_.end()) return;
  block = found->second;
  live_.erase(found);
  auto& stats = stats_[block.device];
  stats.allocated_bytes[0].decrease(block.size);
  stats.requested_bytes[0].decrease(block.requested);
  stats.allocation[0].decrease(1);
  if (block.users.empty()) {
    stats.active_bytes[0].decrease(block.size);
    stats.active[0].decrease(1);
    to_pool(block, place);
    return;
  }
  for (Stream* user : block.users) until.emplace_back(user, user->last());
  deferred_.push_back({block, std::move(until), std::move(place)});
}

void Allocator::reclaim() {
  for (size_t i = 0; i < deferred_.size();) {
    Freed& freed = deferred_[i];
    bool done = std::all_of(
        freed.until.begin(), freed.until.end(), [](auto& use) { return use.first->finished(use.second); });
    if (!done) {
      i++;
      continue;
    }
    Freed ready = std::move(freed);
    deferred_.erase(deferred_.begin() + i);
    auto& stats = stats_[ready.block.device];
    stats.active_bytes[0].decrease(ready.block.size);
    stats.active[0].decrease(1);
    // What the recorded streams did is over. Tasks of others are not.
    auto& block = ready.block;
    auto uses = Ordering::get().unordered(block.stream->number, block.begin, block.begin + block.size);
    bool others = std::any_of(uses.begin(), uses.end(), [&](const Access& use) {
      return std::none_of(ready.until.begin(), ready.until.end(), [&](auto& recorded) {
        return recorded.first->number == use.stream && recorded.second >= use.task;
      });
    });
    if (!others) Ordering::get().forget(block.begin, block.begin + block.size);
    to_pool(block, ready.place);
  }
}

void Allocator::to_pool(const Block& block, std::shared_ptr<Place> place) {
  if (!Ordering::get().unordered(block.stream->number, block.begin, block.begin + block.size).empty())
    unordered_[block.stream].push_back({block, {}, std::move(place)});
  pool_[{block.stream, block.size}].push_back(block);
}

void Allocator::release_cached(int device) {
  {
    WithoutGil without;
    Streams::get().synchronize(device);  // as freeing memory of a device does
  }
  std::lock_guard<std::mutex> lock(mutex_);
  reclaim();
  for (auto& [key, blocks] : pool_) {
    if (key.first->device != device) continue;
    for (const Block& block : blocks) {
      Region& region = Memory::get().device(device);
      size_t offset = block.begin - reinterpret_cast<uintptr_t>(region.tensors);
      size_t first = (offset + kPage - 1) / kPage * kPage;
      size_t last = (offset + block.size) / kPage * kPage;
      if (last > first) fallocate(region.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
      region.addresses->give(offset, block.size);
      Ordering::get().forget(block.begin, block.begin + block.size);
      stats_[device].reserved_bytes[0].decrease(block.size);
      stats_[device].segment[0].decrease(1);
      stats_[device].num_device_free++;
    }
    blocks.clear();
  }
}

void Allocator::emptyCache(c10::MempoolId_t) {
  if (!Streams::get().used()) return;
  for (int device = 0; device < Streams::get().device_count; device++) release_cached(device);
}

void Allocator::copy_data(void* to, const void* from, size_t size) const {
  int device = Memory::device_of(to);
  Stream& stream = Streams::get().current(device < 0 ? Streams::device() : device);
  auto begin = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
  stream.submit(
      [to, from, size] { memcpy(Memory::for_tasks(to), Memory::for_tasks(from), size); },
      {{source, source + size, false}, {begin, begin + size, true}}, here("copy of a storage"));
}

void Allocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  record(pointer.get_context(), Streams::get().at(stream.device_index(), stream.id()));
}

void Allocator::record(const void* begin, Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(reinterpret_cast<uintptr_t>(begin));
  if (found != live_.end() && found->second.stream != &stream) found->second.users.insert(&stream);
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_[device];
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& stats = stats_[device];
  for (auto* each : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                     &stats.active_bytes, &stats.requested_bytes})
    (*each)[0].reset_accumulated();
  stats.num_alloc_retries = stats.num_ooms = 0;
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& stats = stats_[device];
  for (auto* each : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                     &stats.active_bytes, &stats.requested_bytes})
    (*each)[0].reset_peak();
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t total = capacity(device);
  return {std::max<int64_t>(0, total - stats_[device].reserved_bytes[0].current), total};
}

void Allocator::set_capacity(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  capacity_[device] = bytes;
}

int64_t Allocator::capacity(int device) { return capacity_[device] ? capacity_[device] : int64_t(4) << 30; }

// ---- pinned memory

Pinned& Pinned::get() {
  static auto* pinned = new Pinned;
  return *pinned;
}

void Pinned::drop(void* pointer) { get().free(pointer); }

c10::DataPtr Pinned::allocate(size_t size) {
  c10::Device cpu(c10::DeviceType::CPU);
  if (size == 0) return {nullptr, nullptr, &Pinned::drop, cpu};
  Region& region = Memory::get().pinned();
  std::lock_guard<std::mutex> lock(mutex_);
  reclaim();
  size_t bytes = rounded(size, kPage);
  size_t offset = region.addresses->take(bytes);
  TORCH_CHECK(offset != SIZE_MAX, "no pinned memory is left");
  auto* pointer = region.tensors + offset;
  live_[reinterpret_cast<uintptr_t>(pointer)] = Block{bytes, {}};
  return {pointer, pointer, &Pinned::drop, cpu};
}

void Pinned::free(void* pointer) {
  if (!pointer || Streams::get().in_bad_fork()) return;
  std::vector<std::shared_ptr<Place>> copies;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == live_.end()) return;
    for (const Held& held : held_)
      if (!held.keeps_memory && held.begin >= found->first && held.end <= found->first + found->second.size)
        copies.push_back(held.place);
  }
  if (!copies.empty())
    Races::get().add(
        "unordered access to memory: pinned memory is freed while a copy may still use it, of which its allocator does not "
        "know, since the tensor was made from a buffer; the host must wait for the copy first.\nCopy: " +
        copies[0]->text() + "\nFreed: " + here("here")->text());
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == live_.end()) return;
  deferred_.emplace_back(found->first, std::move(found->second));
  live_.erase(found);
  reclaim();
}

void Pinned::reclaim() {
  Region& region = Memory::get().pinned();
  for (size_t i = 0; i < deferred_.size();) {
    auto& [begin, block] = deferred_[i];
    bool done =
        std::all_of(block.until.begin(), block.until.end(), [](auto& use) { return use.first->finished(use.second); });
    if (!done) {
      i++;
      continue;
    }
    uintptr_t end = begin + block.size;
    held_.erase(
        std::remove_if(held_.begin(), held_.end(), [&](const Held& held) { return held.begin >= begin && held.end <= end; }),
        held_.end());
    protect(begin, end);
    memset(Memory::for_tasks(reinterpret_cast<void*>(begin)), 0xFF, block.size);
    region.addresses->give(begin - reinterpret_cast<uintptr_t>(region.tensors), block.size);
    deferred_.erase(deferred_.begin() + i);
  }
}

void Pinned::copy_data(void* to, const void* from, size_t size) const { memcpy(to, from, size); }

bool Pinned::has(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = live_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == live_.begin()) return false;
  auto block = std::prev(next);
  return reinterpret_cast<uintptr_t>(pointer) < block->first + block->second.size;
}

bool Pinned::record_event(void* pointer, void*, c10::Stream stream) {
  Stream& user = Streams::get().at(stream.device_index(), stream.id());
  uint64_t last = user.last();
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = live_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == live_.begin()) return false;
  std::prev(next)->second.until.emplace_back(&user, last);
  return true;
}

void Pinned::hold(
    const void* begin, size_t size, const void* context, Stream& stream, uint64_t task, bool device_writes,
    std::shared_ptr<Place> place) {
  listen_for_faults();
  auto from = reinterpret_cast<uintptr_t>(begin);
  std::lock_guard<std::mutex> lock(mutex_);
  bool keeps_memory = false;
  auto next = live_.upper_bound(from);
  if (next != live_.begin()) {
    auto block = std::prev(next);
    keeps_memory = block->first == from || block->first == reinterpret_cast<uintptr_t>(context);
    auto& uses = block->second.until;
    uses.erase(
        std::remove_if(uses.begin(), uses.end(), [](auto& use) { return use.first->finished(use.second); }), uses.end());
    uses.emplace_back(&stream, task);
  }
  held_.push_back({from, from + size, stream.number, task, device_writes, keeps_memory, std::move(place)});
  protect(from, from + size);
}

void Pinned::host_waited() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Held> over;
  auto kept = std::stable_partition(held_.begin(), held_.end(), [](const Held& held) {
    return !Ordering::get().host_knows(held.stream, held.task);
  });
  over.assign(kept, held_.end());
  held_.erase(kept, held_.end());
  for (const Held& held : over) protect(held.begin, held.end);
}

// Sets what the host may do with the pages of these bytes.
void Pinned::protect(uintptr_t begin, uintptr_t end) {
  begin = begin / kPage * kPage;
  end = rounded(end, kPage);
  auto set = [](uintptr_t from, uintptr_t to, int protection) {
    TORCH_CHECK(mprotect(reinterpret_cast<void*>(from), to - from, protection) == 0, "mprotect: ", strerror(errno));
  };
  set(begin, end, PROT_READ | PROT_WRITE);
  for (bool writes : {false, true})
    for (const Held& held : held_)
      if (held.device_writes == writes && held.begin < end && held.end > begin)
        set(std::max(begin, held.begin / kPage * kPage), std::min<uintptr_t>(end, rounded(held.end, kPage)),
            writes ? PROT_NONE : PROT_READ);
}

bool Pinned::touched(void* address) {
  Region* region = Memory::get().find(address);
  if (!region || region != &Memory::get().pinned()) return false;
  auto at = reinterpret_cast<uintptr_t>(address);
  std::shared_ptr<Place> copy;
  bool writes = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Held& held : held_)
      if (held.begin <= at && at < held.end) {
        copy = held.place;
        writes = held.device_writes;
      }
    mprotect(reinterpret_cast<void*>(at / kPage * kPage), kPage, PROT_READ | PROT_WRITE);
  }
  if (copy)
    Races::get().add(
        std::string("unordered access to memory: the host ") + (writes ? "uses" : "overwrites") +
        " pinned memory while a copy " + (writes ? "into" : "from") +
        " it may still run; it must wait for the copy first.\nCopy: " + copy->text() +
        "\nHost: " + here("here")->text());
  return true;
}

}  // namespace simulated
