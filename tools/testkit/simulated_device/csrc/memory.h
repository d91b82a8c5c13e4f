// Memory of the device, and pinned memory of the host.
//
// Device memory has two addresses: tensors know the one that nothing can be read from or written to (PROT_NONE), tasks of
// streams use the other. Pinned memory is open to the host, but for bytes that a copy still needs: what the host does to
// them before it has waited for the copy is caught.
#pragma once

#include <map>
#include <set>
#include <tuple>
#include <vector>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace simulated {

// Addresses that are taken and given back; the first that fits.
class AddressSpace {
 public:
  explicit AddressSpace(size_t size) { free_[0] = size; }
  size_t take(size_t size);  // SIZE_MAX where there is none
  void give(size_t offset, size_t size);

 private:
  std::map<size_t, size_t> free_;
};

// One range of memory at two addresses.
struct Region {
  char* tensors = nullptr;  // what tensors point to
  char* tasks = nullptr;    // the same bytes, for tasks
  int file = -1;
  std::unique_ptr<AddressSpace> addresses;

  void map(const char* name, int protection);
  bool has(const void* pointer) const;
};

class Memory {
 public:
  static Memory& get();

  static char* for_tasks(const void* pointer);  // the address that tasks use
  static int device_of(const void* pointer);    // -1: host memory
  static void host_waited(const Clock& known);  // the host waited for what `known` says

  Region& device(int device);
  Region& pinned();
  Region* find(const void* pointer);

 private:
  std::mutex mutex_;
  Region devices_[kMostDevices];
  Region pinned_;
};

// Caches freed blocks per stream. A block that another stream uses as well must be recorded there, or its stream must
// have waited for the other one before it gives the block to another tensor; whether the block is large enough for the
// next tensor is not asked. What is given is filled with 0xFF, in the order of the stream: NaN for floats.
class Allocator final : public c10::DeviceAllocator {
 public:
  static Allocator& get();

  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::drop; }
  void copy_data(void* to, const void* from, size_t size) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  void record(const void* begin, Stream& stream);
  void set_capacity(int device, int64_t bytes);
  int64_t capacity(int device);
  void check_freed(Stream& stream);  // what this stream freed while others may use it

 private:
  struct Block {
    uintptr_t begin = 0;
    size_t size = 0;
    size_t requested = 0;
    int device = 0;
    Stream* stream = nullptr;
    std::set<Stream*> users;
  };
  struct Freed {
    Block block;
    std::vector<std::pair<Stream*, uint64_t>> until;  // recorded uses that were queued when it was freed
    std::shared_ptr<Place> place;
  };
  static void drop(void* pointer);
  void free(void* pointer);
  void reclaim();
  void to_pool(const Block& block, std::shared_ptr<Place> place);
  bool take(size_t size, int device, Stream& stream, Block& block);
  void release_cached(int device);  // without the lock

  std::mutex mutex_;
  std::map<uintptr_t, Block> live_;
  std::map<std::pair<Stream*, size_t>, std::vector<Block>> pool_;
  std::vector<Freed> deferred_;
  std::map<Stream*, std::vector<Freed>> unordered_;  // freed, but not in order with other streams
  c10::CachingDeviceAllocator::DeviceStats stats_[kMostDevices];
  int64_t capacity_[kMostDevices] = {};
};

class Pinned final : public at::HostAllocator {
 public:
  static Pinned& get();

  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::drop; }
  void copy_data(void* to, const void* from, size_t size) const override;
  bool record_event(void* pointer, void* context, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool has(const void* pointer);
  // A task of `stream` reads or writes these bytes of pinned memory; until the host has waited for it, the host may only
  // read them, or not even that. As with CUDA's allocator, freed memory lives on until the task is done only if the tensor
  // is the allocator's own, by `context`, or begins where the memory begins; one that was made from a buffer does not.
  void hold(
      const void* begin, size_t size, const void* context, Stream& stream, uint64_t task, bool device_writes,
      std::shared_ptr<Place> place);
  void host_waited();
  // The host touched a protected address. False if it is not of this memory.
  bool touched(void* address);

 private:
  struct Block {
    size_t size = 0;
    std::vector<std::pair<Stream*, uint64_t>> until;
  };
  struct Held {
    uintptr_t begin;
    uintptr_t end;
    uint32_t stream;
    uint64_t task;
    bool device_writes;
    bool keeps_memory;
    std::shared_ptr<Place> place;
  };
  static void drop(void* pointer);
  void free(void* pointer);
  void reclaim();
  void protect(uintptr_t begin, uintptr_t end);

  std::mutex mutex_;
  std::map<uintptr_t, Block> live_;
  std::vector<std::pair<uintptr_t, Block>> deferred_;
  std::vector<Held> held_;
};

}  // namespace simulated
