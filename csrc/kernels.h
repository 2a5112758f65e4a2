// The kernels' interface: plain pointers and sizes, no framework. Every instruction set provides one table of them.
#pragma once

#include <cstdint>

namespace sortrl {

// y[b, k] is computed from x[b, :] and w[k, :]. The batch is cut into `chunks` runs of ceil(batch / chunks) rows;
// chunk c uses the inputs with in_keep[c, i] and computes the outputs with out_keep[c, k] (null: all of them).
struct Problem {
  const float* x;  // (batch, in)
  const float* w;  // (out, in)
  int64_t batch, in, out;
  const uint8_t* in_keep;   // (chunks, in) or null
  const uint8_t* out_keep;  // (chunks, out) or null
  int64_t chunks;
  int threads;

  int64_t chunk_rows() const { return chunks ? (batch + chunks - 1) / chunks : 0; }
};

// A box instead of a point: x holds the lower corner and x_hi the upper one.
struct Box {
  Problem problem;
  const float* x_hi;  // (batch, in)
};

struct Kernels {
  int lanes;
  void (*max_forward)(const Problem&, float* y);
  void (*max_backward)(const Problem&, const float* y, const float* grad, float* grad_x, float* grad_w);
  void (*max_bounds)(const Box&, float* y_lo, float* y_hi);
  void (*lp_forward)(const Problem&, float p, float* y);
  void (*lp_backward)(const Problem&, float p, const float* y, const float* grad, float* grad_x, float* grad_w);
  void (*sort_forward)(const Problem&, const float* mix, int64_t top, float* y);
  void (*sort_backward)(const Problem&, const float* mix, int64_t top, const float* grad, float* grad_x,
                        float* grad_w);
  void (*sort_bounds)(const Box&, const float* mix, int64_t top, float* y_lo, float* y_hi);
  // Element operations per second of the same arithmetic held in registers: the machine's ceiling for an operator.
  double (*limit)(int op, int threads, double seconds);
};

constexpr int64_t kMaxTop = 32;  // the longest mix the sort kernels take

enum Limit { kLimitMax = 0, kLimitPower8 = 1, kLimitPower8Train = 2 };

}  // namespace sortrl
