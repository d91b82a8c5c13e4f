// Which access to memory comes before which: vector clocks of streams and of the host, and the last accesses to every byte.
//
// A stream counts its tasks. A clock says, per stream, up to which task all is known to be done. The clock of a stream is
// what its next task comes after, the clock of the host what the program has waited for. Two accesses of which one writes
// must be ordered by these clocks. Whether they met in this run does not matter, so what the timing of a run hides is
// found as well. (Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978; Mattern, "Virtual
// time and global states of distributed systems", 1989.)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace simulated {

using Clock = std::vector<uint64_t>;  // by the number of a stream; what is missing is 0

void join(Clock& clock, const Clock& other);

// Where in the program something was queued: what it is, and the Python stack. Its text is made when it is asked for.
struct Place {
  virtual ~Place() = default;
  virtual std::string text() const = 0;
};
std::shared_ptr<Place> here(std::string what);

struct Access {
  uint32_t stream;
  uint64_t task;
  std::shared_ptr<Place> place;
};

// Two accesses of which the second does not come after the first. Its text needs Python, so it is made without any lock.
struct Conflict {
  Access first;
  bool first_writes;
  Access second;
  bool second_writes;
  std::string text() const;
};

// The bytes of an access.
struct Span {
  uintptr_t begin;
  uintptr_t end;
  bool write;
};

class Ordering {
 public:
  static Ordering& get();

  // A task is queued: it comes after all that the host and its stream know.
  void queue(uint32_t stream, uint64_t task);
  void wait(uint32_t stream, const Clock& known);  // the stream's next task comes after `known`
  void host_waited(const Clock& known);
  Clock of_stream(uint32_t stream);
  bool host_knows(uint32_t stream, uint64_t task);

  // Notes accesses of a task, and gives the first that is out of order.
  std::optional<Conflict> access(uint32_t stream, uint64_t task, const std::vector<Span>& spans, const std::shared_ptr<Place>& place);
  // Accesses to these bytes that `stream` does not come after; empty if it comes after all.
  std::vector<Access> unordered(uint32_t stream, uintptr_t begin, uintptr_t end);
  void forget(uintptr_t begin, uintptr_t end);  // what happened to these bytes is over
  void name_stream(uint32_t stream, std::string name);
  std::string stream_name(uint32_t stream);

 private:
  struct Range {
    uintptr_t end;
    std::shared_ptr<Access> write;  // the last one
    std::vector<Access> reads;      // since then, the last one of each stream
  };
  using Ranges = std::map<uintptr_t, Range>;

  static bool after(const Clock& clock, const Access& access);
  void split(uintptr_t at);

  std::mutex mutex_;
  Clock host_;
  std::vector<Clock> streams_;
  std::vector<std::string> names_;
  Ranges ranges_;
};

// What was found out of order and not raised yet: outside of operators, nothing can be raised.
class Races {
 public:
  static Races& get();
  void add(std::string text);
  void raise();  // throws what was added since the last call
  std::vector<std::string> all();
  void clear();
  bool raising = true;  // otherwise they are only listed

 private:
  std::mutex mutex_;
  std::vector<std::string> all_;
  std::vector<std::string> pending_;
};

}  // namespace simulated
