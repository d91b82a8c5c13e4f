// A c10d backend for tensors of the device: gloo moves the bytes, in tasks of a stream of the group's own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "streams.h"

namespace simulated {

void define_collectives(pybind11::module& m);

}  // namespace simulated
