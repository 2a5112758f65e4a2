// The C interface of policy.h. To be compiled for the processor it runs on (-O3 -march=native).
#define SORTRL_ISA native
#include "policy.h"

#if defined(__FAST_MATH__)
#error "The certificate needs every rounding where the source has it: compile without -ffast-math (and -Ofast)."
#endif

#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

#include "network.h"

struct sortrl_policy {
  std::unique_ptr<sortrl::Network> network;
};

namespace {

using sortrl::Number;
using sortrl::Outcome;

void tell(const char* what, char* error, size_t size) {
  if (error && size) std::snprintf(error, size, "%s", what);
}

sortrl_status decide(sortrl_policy* policy, const void* observation, Number type, sortrl_decision* decision) {
  sortrl::Decision found;
  switch (policy->network->decide(observation, type, policy->network->units(), 1, &found)) {
    case Outcome::kNotFinite: return SORTRL_NOT_FINITE;
    case Outcome::kOverflow: return SORTRL_OVERFLOW;
    case Outcome::kBusy: return SORTRL_BUSY;
    default: *decision = {found.action, found.runner_up, found.radius, found.margin}; return SORTRL_DECIDED;
  }
}

}  // namespace

extern "C" {

sortrl_policy* sortrl_read(const void* bytes, size_t size, char* error, size_t error_size) try {
  return new sortrl_policy{sortrl::SORTRL_ISA::read_network(bytes, size)};
} catch (const std::exception& exception) {
  tell(exception.what(), error, error_size);
  return nullptr;
}

sortrl_policy* sortrl_open(const char* path, char* error, size_t error_size) try {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path, "rb"), std::fclose);
  if (!file) return tell("The file cannot be opened.", error, error_size), nullptr;
  std::vector<char> bytes, block(1 << 20);
  for (size_t count; (count = std::fread(block.data(), 1, block.size(), file.get())) > 0;)
    bytes.insert(bytes.end(), block.begin(), block.begin() + std::ptrdiff_t(count));
  if (std::ferror(file.get())) return tell("The file cannot be read.", error, error_size), nullptr;
  return sortrl_read(bytes.data(), bytes.size(), error, error_size);
} catch (const std::exception& exception) {
  tell(exception.what(), error, error_size);
  return nullptr;
}

void sortrl_close(sortrl_policy* policy) { delete policy; }

int64_t sortrl_observation_size(const sortrl_policy* policy) { return policy->network->observation_size(); }
int64_t sortrl_actions(const sortrl_policy* policy) { return policy->network->actions(); }

sortrl_status sortrl_decide(sortrl_policy* policy, const float* observation, sortrl_decision* decision) {
  return decide(policy, observation, Number::kFloat32, decision);
}
sortrl_status sortrl_decide_double(sortrl_policy* policy, const double* observation, sortrl_decision* decision) {
  return decide(policy, observation, Number::kFloat64, decision);
}
sortrl_status sortrl_decide_bytes(sortrl_policy* policy, const uint8_t* observation, sortrl_decision* decision) {
  return decide(policy, observation, Number::kUint8, decision);
}

}  // extern "C"
