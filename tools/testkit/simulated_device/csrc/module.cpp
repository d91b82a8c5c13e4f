#include <torch/extension.h>

#include "backend.h"
#include "collectives.h"
#include "operators.h"

using namespace simulated;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_backend", [](int devices) {
    TORCH_CHECK(devices >= 0 && devices <= kMostDevices, "at most ", kMostDevices, " devices, not ", devices);
    Streams::get().device_count = devices;
    register_backend();
    register_kernels_of_the_cpu();
  });
  m.def("device_count", [] { return Streams::get().device_count; });
  m.def("synchronize", [](int device) { Streams::get().synchronize(device); });
  m.def("in_bad_fork", [] { return Streams::get().in_bad_fork(); });
  m.def("used", [] { return Streams::get().used(); });
  m.def("set_lateness", [](double seconds) { Streams::get().late_us = static_cast<int64_t>(seconds * 1e6); });
  m.def("allow_set_data", [](bool allow) { set_data_across_devices = allow; });
  m.def("set_capacity", [](int device, int64_t bytes) { Allocator::get().set_capacity(device, bytes); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("races", [] { return Races::get().all(); });
  m.def("forget_races", [] { Races::get().clear(); });
  m.def("raise_races", [](bool raising) { Races::get().raising = raising; });
  m.def("raise_pending", [] {
    Races::get().raise();
    Streams::get().raise_failure();
  });
  m.def("counts", [] {
    auto& now = counts();
    return std::map<std::string, int64_t>{
        {"operators", now.operators},
        {"waited_for", now.waited_for},
        {"synchronizations", Streams::get().synchronizations},
        {"to_device_async", now.to_device_async},
        {"to_device_sync", now.to_device_sync},
        {"to_host_async", now.to_host_async},
        {"to_host_sync", now.to_host_sync}};
  });
  m.def("waiting_operators", &waiting_operators);
  define_collectives(m);
}
