#include "ordering.h"

#include <algorithm>

#include <c10/util/Exception.h>

namespace simulated {

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

Ordering& Ordering::get() {
  static auto* ordering = new Ordering;  // never destroyed: threads of streams outlive main()
  return *ordering;
}

void Ordering::queue(uint32_t stream, uint64_t task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (streams_.size() <= stream) streams_.resize(stream + 1);
  Clock& clock = streams_[stream];
  join(clock, host_);
  if (clock.size() <= stream) clock.resize(stream + 1, 0);
  clock[stream] = std::max(clock[stream], task);
}

void Ordering::wait(uint32_t stream, const Clock& known) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (streams_.size() <= stream) streams_.resize(stream + 1);
  join(streams_[stream], known);
}

void Ordering::host_waited(const Clock& known) {
  std::lock_guard<std::mutex> lock(mutex_);
  join(host_, known);
}

Clock Ordering::of_stream(uint32_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Clock clock = stream < streams_.size() ? streams_[stream] : Clock();
  join(clock, host_);
  return clock;
}

bool Ordering::host_knows(uint32_t stream, uint64_t task) {
  std::lock_guard<std::mutex> lock(mutex_);
  return after(host_, {stream, task, nullptr});
}

bool Ordering::after(const Clock& clock, const Access& access) {
  return access.stream < clock.size() && clock[access.stream] >= access.task;
}

void Ordering::split(uintptr_t at) {
  auto next = ranges_.upper_bound(at);
  if (next == ranges_.begin()) return;
  auto range = std::prev(next);
  if (range->first == at || range->second.end <= at) return;
  Range rest = range->second;
  range->second.end = at;
  ranges_.emplace(at, std::move(rest));
}

std::optional<Conflict> Ordering::access(
    uint32_t stream, uint64_t task, const std::vector<Span>& spans, const std::shared_ptr<Place>& place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (streams_.size() <= stream) streams_.resize(stream + 1);
  const Clock& clock = streams_[stream];
  std::optional<Conflict> found;
  for (bool writes : {false, true})  // an operator reads its arguments before it writes its results
    for (const Span& span : spans) {
      if (span.write != writes || span.begin >= span.end) continue;
      split(span.begin);
      split(span.end);
      auto range = ranges_.lower_bound(span.begin);
      for (uintptr_t at = span.begin; at < span.end;) {
        if (range == ranges_.end() || range->first > at) {  // nothing happened to these bytes so far
          uintptr_t until = range == ranges_.end() ? span.end : std::min(span.end, range->first);
          range = ranges_.emplace_hint(range, at, Range{until, nullptr, {}});
        }
        Range& bytes = range->second;
        if (!found && bytes.write && bytes.write->stream != stream && !after(clock, *bytes.write))
          found = Conflict{*bytes.write, true, {stream, task, place}, writes};
        if (writes) {
          for (const Access& read : bytes.reads)
            if (!found && read.stream != stream && !after(clock, read))
              found = Conflict{read, false, {stream, task, place}, true};
        } else {
          auto same = std::find_if(bytes.reads.begin(), bytes.reads.end(), [&](auto& read) { return read.stream == stream; });
          if (same == bytes.reads.end()) bytes.reads.push_back({stream, task, place});
          else *same = {stream, task, place};
        }
        at = bytes.end;
        range = writes ? ranges_.erase(range) : std::next(range);
      }
      if (writes)
        ranges_.emplace(span.begin, Range{span.end, std::make_shared<Access>(Access{stream, task, place}), {}});
    }
  return found;
}

std::vector<Access> Ordering::unordered(uint32_t stream, uintptr_t begin, uintptr_t end) {
  std::lock_guard<std::mutex> lock(mutex_);
  Clock clock = stream < streams_.size() ? streams_[stream] : Clock();
  join(clock, host_);
  std::vector<Access> found;
  split(begin);
  for (auto range = ranges_.lower_bound(begin); range != ranges_.end() && range->first < end; ++range) {
    auto& bytes = range->second;
    if (bytes.write && bytes.write->stream != stream && !after(clock, *bytes.write)) found.push_back(*bytes.write);
    for (const Access& read : bytes.reads)
      if (read.stream != stream && !after(clock, read)) found.push_back(read);
  }
  return found;
}

void Ordering::forget(uintptr_t begin, uintptr_t end) {
  std::lock_guard<std::mutex> lock(mutex_);
  split(begin);
  split(end);
  ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
}

void Ordering::name_stream(uint32_t stream, std::string name) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (names_.size() <= stream) names_.resize(stream + 1);
  names_[stream] = std::move(name);
}

std::string Ordering::stream_name(uint32_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return names_.at(stream);
}

std::string Conflict::text() const {
  Ordering& ordering = Ordering::get();
  return "unordered access to memory: " + ordering.stream_name(second.stream) + (second_writes ? " writes" : " reads") +
      " what " + ordering.stream_name(first.stream) + (first_writes ? " writes" : " reads") +
      ", and does not wait for it. Let it wait for an event or for the stream; memory that is freed while another stream "
      "uses it needs record_stream().\nFirst: " +
      first.place->text() + "\nSecond: " + second.place->text();
}

Races& Races::get() {
  static auto* races = new Races;
  return *races;
}

void Races::add(std::string text) {
  std::lock_guard<std::mutex> lock(mutex_);
  all_.push_back(text);
  pending_.push_back(std::move(text));
}

void Races::raise() {
  std::string first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty()) return;
    first = pending_.front();
    pending_.clear();
    if (!raising) return;
  }
  TORCH_CHECK(false, first);
}

std::vector<std::string> Races::all() {
  std::lock_guard<std::mutex> lock(mutex_);
  return all_;
}

void Races::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  all_.clear();
  pending_.clear();
}

}  // namespace simulated
