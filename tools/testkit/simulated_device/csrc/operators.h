// Operators of the device: all but those of memory and views are run by the CPU's kernels, later, in a stream's thread.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace simulated {

// A tensor of the host over the same bytes, for tasks.
at::Tensor for_tasks(const at::Tensor& tensor);

// The bytes between the first and the last element of a tensor.
Span span_of(const at::Tensor& tensor, bool write);

void register_kernels_of_the_cpu();

extern std::atomic<bool> set_data_across_devices;

// Counts of what ran, since the start.
struct Counts {
  std::atomic<int64_t> operators{0};
  std::atomic<int64_t> waited_for{0};  // operators whose result the host had to know
  std::atomic<int64_t> to_device_async{0}, to_device_sync{0};  // bytes
  std::atomic<int64_t> to_host_async{0}, to_host_sync{0};      // bytes
};
Counts& counts();
std::map<std::string, int64_t> waiting_operators();  // those that waited only because torch cannot tell their results' shapes

}  // namespace simulated
