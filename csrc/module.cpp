// Python bindings: addresses and sizes in, nothing out. sortrl/ops/cpu.py is the only caller and has checked that
// every address belongs to a contiguous tensor of the size and type it says.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace sortrl {
namespace SORTRL_ISA {
extern const Kernels kernels;
}

namespace {

const Kernels& kernels = SORTRL_ISA::kernels;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}


Problem problem_of(uintptr_t x, uintptr_t w, int64_t batch, int64_t in, int64_t out, uintptr_t in_keep,
                   uintptr_t out_keep, int64_t chunks, int threads) {
  return {at<const float>(x),        at<const float>(w),         batch,  in,     out,
          at<const uint8_t>(in_keep), at<const uint8_t>(out_keep), chunks, threads};
}

bool all_finite(uintptr_t data, int64_t n) {
  // x - x is 0 for a finite x and NaN otherwise; integer logic keeps the loop free of branches.
  const float* values = at<const float>(data);
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= uint32_t((bits & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

std::vector<std::string> cpu_supports() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    names.push_back("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2");
#endif
  names.push_back("baseline");
  return names;
}

}  // namespace

NB_MODULE(SORTRL_MODULE, m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.attr("lanes") = kernels.lanes;
  m.attr("max_top") = kMaxTop;
  m.def("cpu_supports", cpu_supports);
  m.def("all_finite", all_finite, Release());

  m.def("max_forward",
        [](uintptr_t x, uintptr_t w, int64_t b, int64_t i, int64_t o, uintptr_t ik, uintptr_t ok, int64_t c, int t,
           uintptr_t y) { kernels.max_forward(problem_of(x, w, b, i, o, ik, ok, c, t), at<float>(y)); },
        Release());
  m.def("max_backward",
        [](uintptr_t x, uintptr_t w, int64_t b, int64_t i, int64_t o, uintptr_t ik, uintptr_t ok, int64_t c, int t,
           uintptr_t y, uintptr_t grad, uintptr_t gx, uintptr_t gw) {
          kernels.max_backward(problem_of(x, w, b, i, o, ik, ok, c, t), at<float>(y), at<float>(grad), at<float>(gx),
                               at<float>(gw));
        },
        Release());
  m.def("lp_forward",
        [](uintptr_t x, uintptr_t w, int64_t b, int64_t i, int64_t o, uintptr_t ik, uintptr_t ok, int64_t c, int t,
           float p, uintptr_t y) { kernels.lp_forward(problem_of(x, w, b, i, o, ik, ok, c, t), p, at<float>(y)); },
        Release());
  m.def("lp_backward",
        [](uintptr_t x, uintptr_t w, int64_t b, int64_t i, int64_t o, uintptr_t ik, uintptr_t ok, int64_t c, int t,
           float p, uintptr_t y, uintptr_t grad, uintptr_t gx, uintptr_t gw) {
          kernels.lp_backward(problem_of(x, w, b, i, o, ik, ok, c, t), p, at<float>(y), at<float>(grad), at<float>(gx),
                              at<float>(gw));
        },
        Release());
  m.def("sort_forward",
        [](uintptr_t x, uintptr_t w, int64_t b, int64_t i, int64_t o, int t, uintptr_t mix, int64_t top, uintptr_t y) {
          kernels.sort_forward(problem_of(x, w, b, i, o, 0, 0, b > 0, t), at<float>(mix), top, at<float>(y));
        },
        Release());
  m.def("sort_backward",
        [](uintptr_t x, uintptr_t w, int64_t b, int64_t i, int64_t o, int t, uintptr_t mix, int64_t top, uintptr_t grad,
           uintptr_t gx, uintptr_t gw) {
          kernels.sort_backward(problem_of(x, w, b, i, o, 0, 0, b > 0, t), at<float>(mix), top, at<float>(grad),
                                at<float>(gx), at<float>(gw));
        },
        Release());
  m.def("sort_bounds",
        [](uintptr_t lo, uintptr_t hi, uintptr_t w, int64_t b, int64_t i, int64_t o, int t, uintptr_t mix, int64_t top,
           uintptr_t y_lo, uintptr_t y_hi) {
          kernels.sort_bounds({problem_of(lo, w, b, i, o, 0, 0, b > 0, t), at<float>(hi)}, at<float>(mix), top,
                              at<float>(y_lo), at<float>(y_hi));
        },
        Release());
  m.def("limit", [](int op, int threads, double seconds) { return kernels.limit(op, threads, seconds); }, Release());
}

}  // namespace sortrl
