#include <Python.h>

#include "streams.h"

#include <unistd.h>

#include <thread>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include "memory.h"

namespace simulated {

namespace {

struct StackPlace final : Place {
  std::string what;
  std::shared_ptr<torch::CapturedTraceback> stack;
  std::string text() const override {
    std::string text = what;
    if (!stack) return text;
    auto found = torch::symbolize({stack.get()});
    size_t shown = 0;
    for (uint64_t index : found.tracebacks.at(0)) {
      const auto& frame = found.all_frames[index];
      text += "\n    " + frame.filename + ":" + std::to_string(frame.lineno) + " in " + frame.funcname;
      if (++shown == 16) break;
    }
    return text;
  }
};

}  // namespace

std::shared_ptr<Place> here(std::string what) {
  auto place = std::make_shared<StackPlace>();
  place->what = std::move(what);
#if PY_VERSION_HEX >= 0x030D0000
  bool ending = Py_IsFinalizing();
#else
  bool ending = _Py_IsFinalizing();
#endif
  if (Py_IsInitialized() && !ending) place->stack = torch::CapturedTraceback::gather(true, false, false);
  return place;
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Stream::Stream(int device, int64_t id, uint32_t number) : device(device), id(id), number(number) {
  Ordering::get().name_stream(
      number, (id ? "stream " + std::to_string(id) : std::string("the default stream")) + " of device " + std::to_string(device));
  std::thread([this] { run(); }).detach();
}

void Stream::run() {
  // What the CPU's kernels warn of was said when the operator was called, or is about host memory.
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::set_warning_handler(&silent);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty(); });
    auto begins = queue_.front().begins;
    changed_.wait_until(lock, begins, [&] { return wanted_ > done_; });
    Task task = std::move(queue_.front().task);
    queue_.pop_front();
    lock.unlock();
    try {
      task();
    } catch (const std::exception& error) {
      Streams::get().failed(error.what());
    }
    task = nullptr;
    lock.lock();
    done_++;
    changed_.notify_all();
  }
}

uint64_t Stream::submit(Task task, const std::vector<Span>& spans, const std::shared_ptr<Place>& place) {
  uint64_t position;
  std::optional<Conflict> race;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    position = ++queued_;
    Ordering::get().queue(number, position);
    if (place) race = Ordering::get().access(number, position, spans, place);
    auto late = std::chrono::microseconds(Streams::get().late_us.load());
    queue_.push_back({std::move(task), std::chrono::steady_clock::now() + late});
    if (queue_.size() == 1) changed_.notify_all();
  }
  if (race) Races::get().add(race->text());
  return position;
}

void Stream::wait_for(Stream& other) {
  if (&other == this) return;
  uint64_t position = other.last();
  wait_for(other, position, Ordering::get().of_stream(other.number));
}

void Stream::wait_for(Stream& other, uint64_t position, const Clock& known) {
  if (&other == this) return;
  Ordering::get().wait(number, known);
  submit([&other, position] { other.finish(position); });
}

void Stream::finish(uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (done_ >= position) return;
  if (wanted_ < position) {
    wanted_ = position;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return done_ >= position; });
}

bool Stream::finished(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= position;
}

void Stream::synchronize() {
  Clock known;
  uint64_t position = last();
  known = Ordering::get().of_stream(number);
  {
    WithoutGil without;
    finish(position);
  }
  Memory::host_waited(known);
}

bool Stream::idle() {
  bool idle;
  Clock known;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    idle = done_ == queued_;
    if (idle) known = Ordering::get().of_stream(number);
  }
  if (idle) Memory::host_waited(known);
  return idle;
}

uint64_t Stream::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queued_;
}

void Event::record(Stream& stream) {
  auto record = std::make_shared<Record>();
  record->stream = &stream;
  record->at = std::make_shared<std::chrono::steady_clock::time_point>();
  record->position = stream.submit([at = record->at] { *at = std::chrono::steady_clock::now(); });
  record->known = Ordering::get().of_stream(stream.number);
  std::lock_guard<std::mutex> lock(mutex_);
  last_ = std::move(record);
}

std::shared_ptr<Event::Record> Event::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

void Event::block(Stream& stream) {
  if (auto record = last()) stream.wait_for(*record->stream, record->position, record->known);
}

bool Event::query() {
  auto record = last();
  if (!record) return true;
  if (!record->stream->finished(record->position)) return false;
  Memory::host_waited(record->known);
  return true;
}

void Event::synchronize() {
  auto record = last();
  if (!record) return;
  {
    WithoutGil without;
    record->stream->finish(record->position);
  }
  Memory::host_waited(record->known);
}

double Event::milliseconds_until(Event& later) {
  TORCH_CHECK(query() && later.query(), "both events must be recorded and done before the time between them is known");
  auto first = last(), second = later.last();
  TORCH_CHECK(first && second, "an event that was never recorded has no time");
  return std::chrono::duration<double, std::milli>(*second->at - *first->at).count();
}

Streams& Streams::get() {
  static auto* streams = new Streams;
  return *streams;
}

int& Streams::device() {
  thread_local int device = 0;
  return device;
}

int64_t& Streams::current_id(int device) {
  thread_local int64_t ids[kMostDevices] = {};
  return ids[device];
}

void Streams::in_use() {
  int process = process_.load();
  if (process == 0) process_.compare_exchange_strong(process, getpid()), process = process_.load();
  TORCH_CHECK(
      process == getpid(),
      "the device cannot be used in a process that was forked from one that had used it; start it by \"spawn\"");
}

bool Streams::in_bad_fork() {
  int process = process_.load();
  return process != 0 && process != getpid();
}

bool Streams::used() { return process_.load() == getpid(); }

Stream& Streams::at(int device, int64_t id) {
  in_use();
  std::lock_guard<std::mutex> lock(mutex_);
  auto& streams = streams_[device];
  if (streams.empty()) streams.push_back(std::make_unique<Stream>(device, 0, count_++));
  return *streams.at(id);
}

Stream& Streams::current(int device) { return at(device, current_id(device)); }

Stream& Streams::fresh(int device) {
  at(device, 0);
  std::lock_guard<std::mutex> lock(mutex_);
  auto& streams = streams_[device];
  streams.push_back(std::make_unique<Stream>(device, streams.size(), count_++));
  return *streams.back();
}

Stream& Streams::from_pool(int device) {
  std::lock_guard<std::mutex> lock(pool_mutex_);
  auto& pool = pool_[device];
  if (pool.size() < 32) {
    pool.push_back(&fresh(device));
    return *pool.back();
  }
  return *pool[next_in_pool_[device]++ % pool.size()];
}

void Streams::synchronize(int device) {
  size_t count;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    count = streams_[device].size();
  }
  for (size_t id = 0; id < count; id++) at(device, id).synchronize();
}

void Streams::failed(std::string error) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_.empty()) failure_ = std::move(error);
}

void Streams::raise_failure() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_.empty()) return;
    error.swap(failure_);
  }
  TORCH_CHECK(false, "the device failed after this call was queued: ", error);
}

}  // namespace simulated
