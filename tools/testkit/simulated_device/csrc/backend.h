// What torch asks of a device: guard, streams, events, random states.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "memory.h"

namespace simulated {

// A seed and a count of draws, as generators of devices have it: every operator draws from a generator of its own, so
// that what is drawn depends on the order of the calls alone, not on when streams run.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  // A generator of the CPU for one task.
  static at::Generator for_task(std::optional<at::Generator> given, int device);

 private:
  Generator* clone_impl() const override;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator& default_generator(int device);

void register_backend();

}  // namespace simulated
