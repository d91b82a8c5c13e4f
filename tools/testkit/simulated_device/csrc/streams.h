// Streams: a thread each, which begins its tasks late on purpose.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ordering.h"

namespace simulated {

constexpr int kMostDevices = 8;

using Task = std::function<void()>;

class Stream {
 public:
  Stream(int device, int64_t id, uint32_t number);

  const int device;
  const int64_t id;       // among the streams of its device; 0 is the default stream
  const uint32_t number;  // among all streams, in clocks

  // Queues a task that accesses `spans`; gives its position. Raises what is out of order, after it was queued.
  uint64_t submit(Task task, const std::vector<Span>& spans = {}, const std::shared_ptr<Place>& place = nullptr);
  void wait_for(Stream& other);                             // the next tasks come after all that `other` has now
  void wait_for(Stream& other, uint64_t position, const Clock& known);
  void finish(uint64_t position);  // blocks the caller until the task has run; what it waits for begins at once
  bool finished(uint64_t position);
  void synchronize();  // the host waits for all that is queued, and knows it
  bool idle();
  uint64_t last();

 private:
  struct Queued {
    Task task;
    std::chrono::steady_clock::time_point begins;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  uint64_t queued_ = 0;
  uint64_t done_ = 0;
  uint64_t wanted_ = 0;  // tasks up to here begin at once
};

class Event {
 public:
  void record(Stream& stream);
  void block(Stream& stream);
  bool query();
  void synchronize();
  double milliseconds_until(Event& later);

 private:
  struct Record {
    Stream* stream;
    uint64_t position;
    Clock known;
    std::shared_ptr<std::chrono::steady_clock::time_point> at;
  };
  std::shared_ptr<Record> last();  // nothing if it was never recorded

  std::mutex mutex_;
  std::shared_ptr<Record> last_;
};

class Streams {
 public:
  static Streams& get();

  Stream& at(int device, int64_t id);
  Stream& current(int device);
  Stream& fresh(int device);      // never given before
  Stream& from_pool(int device);  // the next of 32, as torch.cuda's pool
  void synchronize(int device);   // the host waits for all streams of a device

  int device_count = 2;
  std::atomic<int64_t> late_us{5000};  // a task begins that much later than it is queued, unless the host waits for it
  static int& device();                // the current device of this thread
  static int64_t& current_id(int device);
  // Raises if this process was forked from one that used the device; otherwise the device is in use from here on.
  void in_use();
  bool in_bad_fork();
  bool used();
  // An error of a task, which the next call that looks at the device raises.
  void failed(std::string error);
  void raise_failure();

  std::atomic<int64_t> synchronizations{0};  // how often the host waited for a stream, a device or an event

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_[kMostDevices];
  std::mutex pool_mutex_;
  std::vector<Stream*> pool_[kMostDevices];
  size_t next_in_pool_[kMostDevices] = {};
  uint32_t count_ = 0;
  std::atomic<int> process_{0};
  std::mutex failure_mutex_;
  std::string failure_;
};

// Lets other threads run Python while this one waits.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();

 private:
  void* state_ = nullptr;
};

}  // namespace simulated
