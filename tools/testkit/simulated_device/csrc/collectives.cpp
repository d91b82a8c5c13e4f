#include <Python.h>

#include "collectives.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "operators.h"

namespace simulated {

namespace {

using c10d::Backend;
using Tensors = std::vector<at::Tensor>;

// The group that carries messages between hosts; used in tasks, and aborted by any thread.
class Gloo {
 public:
  explicit Gloo(c10::intrusive_ptr<Backend> backend) : backend_(std::move(backend)) {}
  Backend* operator->() const { return backend_.get(); }
  // gloo cannot end a collective that it has begun, so whoever waits for it looks whether it was aborted.
  void wait(const c10::intrusive_ptr<c10d::Work>& work) {
    const bool tells = !c10d::isP2POp(work->retrieveOpType());  // its messages are complete only when they were waited for
    for (int looked = 0; tells && !work->isCompleted(); looked++) {
      if (aborted_) {
        abandoned_.push_back(work);
        throw std::runtime_error("the process group was aborted");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(looked < 100 ? 20 : 500));
    }
    work->wait();
  }
  void abort() { aborted_ = true; }

 private:
  const c10::intrusive_ptr<Backend> backend_;
  std::atomic<bool> aborted_{false};
  std::vector<c10::intrusive_ptr<c10d::Work>> abandoned_;  // gloo may still write into their tensors
};

using Later = std::function<c10::intrusive_ptr<c10d::Work>(Gloo&)>;  // starts gloo's own collective, in the task

c10::Stream packed(const Stream& stream) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(stream.device)), stream.id);
}

// A task of a stream, to wait for.
struct Ticket {
  explicit Ticket(Stream& stream)
      : stream(&stream), position(stream.last()), known(Ordering::get().of_stream(stream.number)) {}
  Stream* stream;
  uint64_t position;
  Clock known;
};

// What a collective returns. Waiting for it lets the current stream wait, not the host.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(std::vector<Ticket> tickets, int device, c10d::OpType type, Tensors results, bool host_waits)
      : Work(-1, type), tickets_(std::move(tickets)), device_(device), results_(std::move(results)), host_waits_(host_waits) {
    if (tickets_.empty()) return;
    Stream& last = *tickets_.back().stream;
    c10::StreamGuard guard(packed(last));
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{packed(last).device()});
    future_->markCompleted(c10::IValue(results_));
  }
  bool isCompleted() override {
    return std::all_of(tickets_.begin(), tickets_.end(), [](auto& each) { return each.stream->finished(each.position); });
  }
  bool isSuccess() const override { return true; }  // what fails is raised by the next call that looks at the device
  Tensors result() override { return results_; }
  void synchronize() override {
    for (auto& each : tickets_) Streams::get().current(device_).wait_for(*each.stream, each.position, each.known);
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    (void)timeout;
    synchronize();
    if (host_waits_) {
      Streams::get().current(device_).synchronize();
      Streams::get().raise_failure();
    }
    Races::get().raise();
    return true;
  }
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  const std::vector<Ticket>& tickets() const { return tickets_; }

 private:
  std::vector<Ticket> tickets_;
  int device_;
  Tensors results_;
  bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Python copies the options of a group that it splits, so they are a class that can be copied there.
struct DeviceOptions final : Backend::Options {
  using Options::Options;
};

class DeviceBackend final : public Backend {
 public:
  DeviceBackend(c10::intrusive_ptr<Backend> gloo, std::string name, std::chrono::milliseconds timeout)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::make_shared<Gloo>(std::move(gloo))),
        name_(std::move(name)),
        options_(c10::make_intrusive<DeviceOptions>(name_, timeout)) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setGroupUid(const std::string& uid) override {  // under which torch's flight recorder shows what waits
    Backend::setGroupUid(uid);
    (*gloo_)->setGroupUid(uid);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    (*gloo_)->setTimeout(timeout);
  }
  void abort() override { gloo_->abort(); }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    auto gloo = (*gloo_)->split(c10::make_intrusive<c10d::PrefixStore>("simulated", store), ranks, options);
    if (!gloo) return nullptr;  // this rank is not among them
    gloo->setTimeout(options->timeout);
    return c10::make_intrusive<DeviceBackend>(std::move(gloo), name_, options->timeout);
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    coalesced_.clear();
    coalescing_ = true;
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {  // all begin together, and end together, as in one kernel
    coalescing_ = false;
    if (coalesced_.empty())
      return c10::make_intrusive<DeviceWork>(
          std::vector<Ticket>{}, last_device_, c10d::OpType::COALESCED, Tensors{}, false);
    std::vector<Later> calls;
    std::vector<Span> spans;
    Tensors tensors;
    for (auto& each : coalesced_) {
      calls.push_back(std::move(each.call));
      spans.insert(spans.end(), each.spans.begin(), each.spans.end());
      tensors.insert(tensors.end(), each.tensors.begin(), each.tensors.end());
    }
    coalesced_.clear();
    Later all = [calls = std::move(calls)](Gloo& gloo) mutable -> c10::intrusive_ptr<c10d::Work> {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (auto& call : calls) works.push_back(call(gloo));
      for (auto& work : works)
        if (work) gloo.wait(work);
      return nullptr;
    };
    return submit("coalesced collectives", c10d::OpType::COALESCED, tensors, spans, Tensors{}, all, last_device_, -1, false);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = seen(tensors);
    return queue("broadcast", c10d::OpType::BROADCAST, options.rootRank == getRank() ? tensors : Tensors{}, tensors,
        [host, options](Gloo& gloo) mutable { return gloo->broadcast(host, options); });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = seen(tensors);
    return queue("allreduce", c10d::OpType::ALLREDUCE, tensors, tensors, reduced(host, options,
        [](Gloo& gloo, Tensors& all, const c10d::AllreduceOptions& sum) { return gloo->allreduce(all, sum); }));
  }

  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    each.timeout = options.timeout;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, each);
    }
    return of_last(c10d::OpType::ALLREDUCE_COALESCED, tensors);
  }

  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = seen(tensors);
    return queue("reduce", c10d::OpType::REDUCE, tensors, tensors, reduced(host, options,
        [](Gloo& gloo, Tensors& all, const c10d::ReduceOptions& sum) { return gloo->reduce(all, sum); }));
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host = seen(inputs);
    auto targets = seen(outputs);
    return queue("allgather", c10d::OpType::ALLGATHER, inputs, flat(outputs),
        [host, targets, options](Gloo& gloo) mutable { return gloo->allgather(targets, host, options); });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return queue("all_gather_into_tensor", c10d::OpType::_ALLGATHER_BASE, {input}, {output},
        [to = for_tasks(output), from = for_tasks(input), options](Gloo& gloo) mutable {
          return gloo->_allgather_base(to, from, options);
        });
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < inputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    return of_last(c10d::OpType::COALESCED, outputs);
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host = seen(inputs);
    auto targets = seen(outputs);
    return queue("gather", c10d::OpType::GATHER, inputs, flat(outputs),
        [host, targets, options](Gloo& gloo) mutable { return gloo->gather(targets, host, options); });
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto host = seen(inputs);
    auto targets = seen(outputs);
    return queue("scatter", c10d::OpType::SCATTER, flat(inputs), outputs,
        [host, targets, options](Gloo& gloo) mutable { return gloo->scatter(targets, host, options); });
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    // By a sum of all, since that is all that gloo needs to know.
    auto targets = seen(outputs);
    auto sources = seen(inputs);
    int rank = getRank(), size = getSize();
    sequence_ += size - 1;
    return queue("reduce_scatter", c10d::OpType::REDUCE_SCATTER, flat(inputs), outputs,
        [targets, sources, options, rank, size](Gloo& gloo) mutable -> c10::intrusive_ptr<c10d::Work> {
          for (size_t i = 0; i < targets.size(); i++) {
            Tensors own;
            for (auto& each : sources[i]) own.push_back(each.clone());
            for (int peer = 0; peer < size; peer++) {
              Tensors one{own[peer]};
              sum(gloo, one, options.reduceOp, size, options.timeout);
              if (peer == rank) targets[i].copy_(one[0]);
            }
          }
          return nullptr;
        });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    int rank = getRank(), size = getSize();
    return queue("reduce_scatter_tensor", c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output},
        [to = for_tasks(output), from = for_tasks(input), options, rank, size](
            Gloo& gloo) mutable -> c10::intrusive_ptr<c10d::Work> {
          Tensors whole{from.contiguous().clone()};
          sum(gloo, whole, options.reduceOp, size, options.timeout);
          to.copy_(whole[0].view({size, -1}).select(0, rank).view(to.sizes()));
          return nullptr;
        });
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < inputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options);
    return of_last(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return queue("all_to_all_single", c10d::OpType::ALLTOALL_BASE, {input}, {output},
        [to = for_tasks(output), from = for_tasks(input), output_sizes, input_sizes, options](Gloo& gloo) mutable {
          return gloo->alltoall_base(to, from, output_sizes, input_sizes, options);
        });
  }

  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    // By sends and receives; gloo has no such collective.
    auto targets = seen(outputs);
    auto sources = seen(inputs);
    int rank = getRank(), size = getSize();
    return queue("all_to_all", c10d::OpType::ALLTOALL, inputs, outputs,
        [targets, sources, rank, size](Gloo& gloo) mutable -> c10::intrusive_ptr<c10d::Work> {
          std::vector<c10::intrusive_ptr<c10d::Work>> works;
          Tensors kept;
          for (int peer = 0; peer < size; peer++) {
            if (peer == rank) {
              targets[peer].copy_(sources[peer]);
              continue;
            }
            Tensors out{sources[peer].contiguous()}, in{targets[peer]};
            kept.push_back(out[0]);
            works.push_back(gloo->send(out, peer, kAllToAll));
            works.push_back(gloo->recv(in, peer, kAllToAll));
          }
          for (auto& work : works) gloo.wait(work);
          return nullptr;
        });
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer, int tag) override {
    auto host = seen(tensors);
    return queue("send", c10d::OpType::SEND, tensors, {},
        [host, peer, tag](Gloo& gloo) mutable { return gloo->send(host, peer, tag); }, peer, true);
  }

  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer, int tag) override {
    auto host = seen(tensors);
    return queue("recv", c10d::OpType::RECV, {}, tensors,
        [host, peer, tag](Gloo& gloo) mutable { return gloo->recv(host, peer, tag); }, peer, false);
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return queue("barrier", c10d::OpType::BARRIER, {}, {},
        [options](Gloo& gloo) { return gloo->barrier(options); });
  }

 private:
  static constexpr int kAllToAll = 0x0a2a;

  // Sums over all ranks, in place; gloo has neither mean nor a factor before the sum.
  static void sum(
      Gloo& gloo, Tensors& tensors, const c10d::ReduceOp& op, int size, std::chrono::milliseconds timeout) {
    c10d::AllreduceOptions options;
    options.timeout = timeout;
    options.reduceOp = plain(op);
    before(op, tensors);
    gloo.wait(gloo->allreduce(tensors, options));
    after(op, tensors, size);
  }

  static c10d::ReduceOp plain(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::PREMUL_SUM ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }

  static void before(const c10d::ReduceOp& op, Tensors& tensors) {
    if (!(op == c10d::ReduceOp::PREMUL_SUM)) return;
    auto* factor = reinterpret_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    for (auto& tensor : tensors)
      if (factor->tensor_factor.defined()) tensor.mul_(factor->tensor_factor.cpu());
      else tensor.mul_(factor->double_factor);
  }

  static void after(const c10d::ReduceOp& op, Tensors& tensors, int size) {
    if (op == c10d::ReduceOp::AVG)
      for (auto& tensor : tensors) tensor.div_(size);
  }

  template <class Options, class Call>
  Later reduced(Tensors host, const Options& options, Call call) {
    int size = getSize();
    return [host, options, call, size](Gloo& gloo) mutable -> c10::intrusive_ptr<c10d::Work> {
      Options plainly = options;
      plainly.reduceOp = plain(options.reduceOp);
      before(options.reduceOp, host);
      gloo.wait(call(gloo, host, plainly));
      after(options.reduceOp, host, size);
      return nullptr;
    };
  }

  static Tensors seen(const Tensors& tensors) {
    Tensors host;
    for (auto& tensor : tensors) host.push_back(for_tasks(tensor));
    return host;
  }

  static std::vector<Tensors> seen(const std::vector<Tensors>& lists) {
    std::vector<Tensors> host;
    for (auto& list : lists) host.push_back(seen(list));
    return host;
  }

  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  // The stream on which the group's collectives run; sends and receives have one per peer and direction, so that they do
  // not wait for each other.
  Stream& of_group(int device, int peer = -1, bool sends = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    Stream*& stream = streams_[{device, peer, sends}];
    if (!stream) stream = &Streams::get().fresh(device);
    return *stream;
  }

  c10::intrusive_ptr<c10d::Work> queue(
      const char* name, c10d::OpType type, const Tensors& reads, const Tensors& writes, Later call, int peer = -1,
      bool sends = false) {
    int device = Streams::device();
    std::vector<Span> spans;
    for (auto* list : {&reads, &writes})
      for (auto& tensor : *list) {
        TORCH_CHECK(
            tensor.device().is_privateuseone(), name, " of the device's backend takes tensors of the device, not of ",
            tensor.device());
        TORCH_CHECK(tensor.is_contiguous(), name, " takes contiguous tensors");
        device = tensor.device().index();
        spans.push_back(span_of(tensor, list == &writes));
      }
    last_device_ = device;
    sequence_++;
    Tensors tensors = reads;
    tensors.insert(tensors.end(), writes.begin(), writes.end());
    if (coalescing_) {
      coalesced_.push_back({std::move(call), spans, tensors});
      return c10::make_intrusive<DeviceWork>(std::vector<Ticket>{}, device, type, writes, false);
    }
    return submit(name, type, tensors, spans, writes, std::move(call), device, peer, sends);
  }

  c10::intrusive_ptr<c10d::Work> submit(
      const char* name, c10d::OpType type, const Tensors& tensors, const std::vector<Span>& spans, const Tensors& results,
      Later call, int device, int peer, bool sends) {
    Stream& current = Streams::get().current(device);
    Stream& stream = of_group(device, peer, sends);
    stream.wait_for(current);
    for (auto& tensor : tensors) Allocator::get().record(tensor.storage().data_ptr().get_context(), stream);
    auto place = here(name);
    stream.submit(
        [gloo = gloo_, call = std::move(call), name = std::string(name)]() mutable {
          try {
            auto work = call(*gloo);
            if (work) gloo->wait(work);
          } catch (const std::exception& error) {
            throw std::runtime_error(name + ": " + error.what());
          }
        },
        spans, place);
    Races::get().raise();
    return c10::make_intrusive<DeviceWork>(
        std::vector<Ticket>{Ticket(stream)}, device, type, results, type == c10d::OpType::BARRIER);
  }

  // For all that was queued on the group's stream so far.
  c10::intrusive_ptr<c10d::Work> of_last(c10d::OpType type, const Tensors& results) {
    return c10::make_intrusive<DeviceWork>(
        std::vector<Ticket>{Ticket(of_group(last_device_))}, last_device_, type, results, false);
  }

  std::shared_ptr<Gloo> gloo_;
  const std::string name_;
  c10::intrusive_ptr<DeviceOptions> options_;
  std::mutex mutex_;
  std::map<std::tuple<int, int, bool>, Stream*> streams_;
  int last_device_ = 0;
  bool coalescing_ = false;
  struct Coalesced {
    Later call;
    std::vector<Span> spans;
    Tensors tensors;
  };
  std::vector<Coalesced> coalesced_;
  uint64_t sequence_ = 0;
};

}  // namespace

void define_collectives(pybind11::module& m) {
  pybind11::module::import("torch.distributed");
  pybind11::class_<DeviceOptions, Backend::Options, c10::intrusive_ptr<DeviceOptions>>(m, "DeviceOptions")
      .def("__deepcopy__", [](const DeviceOptions& options, const pybind11::dict&) {
        return c10::make_intrusive<DeviceOptions>(options.backend, options.timeout);
      });
  pybind11::class_<DeviceBackend, Backend, c10::intrusive_ptr<DeviceBackend>>(m, "DeviceBackend")
      .def_property_readonly("options", &DeviceBackend::getBackendOptions);
  m.def("collectives", [](c10::intrusive_ptr<Backend> gloo, std::string name, double seconds) {
    auto timeout = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
    return c10::intrusive_ptr<Backend>(c10::make_intrusive<DeviceBackend>(std::move(gloo), std::move(name), timeout));
  });
}

}  // namespace simulated
