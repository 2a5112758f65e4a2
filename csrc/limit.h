// The machine's ceiling for an operator: its arithmetic on values that never leave the registers.
#pragma once

#include <chrono>

#include "lp.h"

namespace sortrl::SORTRL_ISA {

#if defined(__x86_64__)
#define SORTRL_OPAQUE(v) asm volatile("" : "+x"(v))
#else
#define SORTRL_OPAQUE(v) asm volatile("" : "+w"(v))
#endif

template <class Step>
double limit_of(int threads, double seconds, Step step) {
  constexpr int kAccumulators = kRows * kVectors, kSteps = 4096;
  std::atomic<int64_t> total{0};
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  parallel_for(threads, threads, [&](int64_t) {
    V acc[kAccumulators] = {}, w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = broadcast(0.5f + float(v));
    while (elapsed() < seconds) {
      V x = broadcast(1.0f);
      for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          SORTRL_OPAQUE(x);  // a new value, as far as the compiler knows
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) step(acc[r * kVectors + v], x - w[v]);
        }
      }
      for (V& a : acc) {
        SORTRL_OPAQUE(a);
        a = V{};
      }
      total += int64_t(kSteps) * kAccumulators * kLanes;
    }
  });
  return double(total.load()) / elapsed();
}

inline double limit(int op, int threads, double seconds) {
  switch (op) {
    case kLimitPower8:
      return limit_of(threads, seconds, [](V& a, V t) {
        const V root = even_power<1>(t, 2);
        a += root * root;
      });
    case kLimitPower8Train:  // forward, then a power for both gradients
      return limit_of(threads, seconds, [](V& a, V t) {
        const V root = even_power<1>(t, 2);
        a += root * root;
        SORTRL_OPAQUE(t);
        const V power = odd_power<1>(t, 3);
        a += power * power;
        a -= t * power;
      });
    default:
      return limit_of(threads, seconds, [](V& a, V t) { a = max_with_abs(a, t); });
  }
}

}  // namespace sortrl::SORTRL_ISA
