// The max layer, y[b, k] = max_i |x[b, i] - w[k, i]|, its gradient, and its range over a box.
#pragma once

#include <cmath>
#include <limits>

#include "levels.h"

namespace sortrl::SORTRL_ISA {

// Register tile: kRows rows of x against kVectors vectors of outputs.
#if defined(__AVX512F__)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kVectors = 2;
constexpr int64_t kWidth = kVectors * kLanes;
constexpr int64_t kInputBlock = 512;  // inputs per packed panel: keeps it in the second-level cache
constexpr int64_t kPanelSize = kInputBlock * kWidth;
constexpr int64_t kTaskRows = 512;

// Accumulate `Step` over `inputs` values of R rows: acc[r][v] = step(acc[r][v], x[r][i] - w[i][v]).
template <int R, class Step>
inline void accumulate(const float* const* x, const float* panel, int64_t inputs, float* acc, Step step) {
  V a[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) a[r][v] = load(acc + r * kWidth + v * kLanes);
  for (int64_t i = 0; i < inputs; ++i) {
    V w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = load(panel + i * kWidth + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V xi = broadcast(x[r][i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) a[r][v] = step(a[r][v], xi - w[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(acc + r * kWidth + v * kLanes, a[r][v]);
}

// A type rather than a function pointer, so that it is inlined.
struct MaxStep {
  V operator()(V acc, V t) const { return max_with_abs(acc, t); }
};

// Accumulate over all inputs of a task into acc[row][kWidth], which the caller has initialised.
template <class Step>
void accumulate_task(const Problem& problem, const ForwardTask& task, const Rows& rows, Buffer<float>& panel,
                     float* acc, Step step) {
  const int64_t n = task.row_end - task.row_begin, inputs = task.inputs->size();
  for (int64_t from = 0; from < inputs; from += kInputBlock) {
    const int64_t to = std::min(inputs, from + kInputBlock);
    pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kWidth, from, to, panel.data());
    int64_t b = 0;
    const float* x[kRows];
    for (; b + kRows <= n; b += kRows) {
      for (int r = 0; r < kRows; ++r) x[r] = rows[b + r] + from;
      accumulate<kRows>(x, panel.data(), to - from, acc + b * kWidth, step);
    }
    for (; b < n; ++b) {
      x[0] = rows[b] + from;
      accumulate<1>(x, panel.data(), to - from, acc + b * kWidth, step);
    }
  }
}

inline void max_forward(const Problem& problem, float* y) {
  const Levels levels(problem);
  for_each_panel(problem, kWidth, kTaskRows, [&](ForwardTask task) {
    Buffer<float> acc((task.row_end - task.row_begin) * kWidth, 0.0f);
    if (levels) {  // the same differences, and a maximum does not depend on their order
      Buffer<float> panel(problem.in * kWidth);
      pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kWidth, 0, problem.in, panel.data());
      accumulate_levels<kWidth>(levels, panel.data(), task.row_begin, task.row_end, acc.data(),
                                [](V x, V w, int64_t) { return absolute(x - w); }, [](V a, V b) { return maximum(a, b); });
      task.inputs = &levels.rest();
    }
    const Rows rows(problem.x, problem.in, *task.inputs, task.row_begin, task.row_end);
    Buffer<float> panel(kPanelSize);
    accumulate_task(problem, task, rows, panel, acc.data(), MaxStep());
    for (int64_t b = task.row_begin; b < task.row_end; ++b)
      scatter_outputs(task, acc.data() + (b - task.row_begin) * kWidth, kWidth, y + b * problem.out);
  });
}

// The first i with |x[i] - w[i]| == y. It exists, because y was computed by the same subtraction; dropped inputs
// hold NaN in x and never match.
inline int64_t find_witness(const float* x, const float* w, int64_t n, float y) {
  const V target = broadcast(y);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const uint32_t hit = lanes_equal(absolute(load(x + i) - load(w + i)), target);
    if (hit) return i + __builtin_ctz(hit);
  }
  for (; i < n; ++i)
    if (std::fabs(x[i] - w[i]) == y) return i;
  return -1;
}

inline void max_backward(const Problem& problem, const float* y, const float* grad, float* grad_x, float* grad_w) {
  constexpr int64_t kBlock = 16;  // rows of x and of w that stay in cache together
  const int64_t in = problem.in, out = problem.out;
  Buffer<int32_t> witness(problem.batch * out, -1);
  const int64_t row_tasks = (problem.batch + kBlock - 1) / kBlock;
  parallel_for(row_tasks, problem.threads, [&](int64_t task) {
    const int64_t begin = task * kBlock, end = std::min(problem.batch, begin + kBlock);
    Buffer<float> x((end - begin) * in);
    std::copy(problem.x + begin * in, problem.x + end * in, x.data());
    if (problem.in_keep)
      for (int64_t b = begin; b < end; ++b) {
        const uint8_t* keep = problem.in_keep + b / problem.chunk_rows() * in;
        for (int64_t i = 0; i < in; ++i)
          if (!keep[i]) x[(b - begin) * in + i] = std::numeric_limits<float>::quiet_NaN();
      }
    for (int64_t block = 0; block < out; block += kBlock)
      for (int64_t b = begin; b < end; ++b) {
        const uint8_t* keep = problem.out_keep ? problem.out_keep + b / problem.chunk_rows() * out : nullptr;
        const float* row = x.data() + (b - begin) * in;
        for (int64_t k = block; k < std::min(out, block + kBlock); ++k) {
          if ((keep && !keep[k]) || grad[b * out + k] == 0.0f) continue;
          const int64_t i = find_witness(row, problem.w + k * in, in, y[b * out + k]);
          if (i < 0) continue;
          witness[b * out + k] = int32_t(i);
          const float g = grad[b * out + k];
          if (grad_x) grad_x[b * in + i] += with_sign(g, row[i] - problem.w[k * in + i]);
        }
      }
  });
  if (!grad_w) return;
  parallel_for((out + kBlock - 1) / kBlock, problem.threads, [&](int64_t task) {
    for (int64_t b = 0; b < problem.batch; ++b)
      for (int64_t k = task * kBlock; k < std::min(out, (task + 1) * kBlock); ++k) {
        const int32_t i = witness[b * out + k];
        if (i < 0) continue;
        const float g = grad[b * out + k];
        grad_w[k * in + i] -= with_sign(g, problem.x[b * in + i] - problem.w[k * in + i]);
      }
  });
}

// The range over a box, for R rows against a panel. With a = lo - w and b = hi - w, the nearest point of an interval is
// max(0, a, -b) away and the farthest one max(b, -a): both need the same two differences, four maxima of them, and no
// absolute value. Rounding is monotone and symmetric, so the results are those of the corners themselves.
template <int R>
inline void accumulate_box(const float* const* lo, const float* const* hi, const float* panel, int64_t inputs,
                           float* near, float* far) {
  V max_a[R][kVectors], min_a[R][kVectors], max_b[R][kVectors], min_b[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      max_a[r][v] = load(near + r * kWidth + v * kLanes);
      max_b[r][v] = load(far + r * kWidth + v * kLanes);
      min_a[r][v] = min_b[r][v] = V{};
    }
  for (int64_t i = 0; i < inputs; ++i) {
    V w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = load(panel + i * kWidth + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V from = broadcast(lo[r][i]), to = broadcast(hi[r][i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const V a = from - w[v], b = to - w[v];
        max_a[r][v] = maximum(max_a[r][v], a);
        min_a[r][v] = minimum(min_a[r][v], a);
        max_b[r][v] = maximum(max_b[r][v], b);
        min_b[r][v] = minimum(min_b[r][v], b);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      store(near + r * kWidth + v * kLanes, maximum(-min_b[r][v], max_a[r][v]));
      store(far + r * kWidth + v * kLanes, maximum(-min_a[r][v], max_b[r][v]));
    }
}

inline void max_bounds(const Box& box, float* y_lo, float* y_hi) {
#if defined(__AVX512F__)
  constexpr int kBoxRows = 3;  // four accumulators for every row and vector
#else
  constexpr int kBoxRows = 1;
#endif
  const Problem& problem = box.problem;
  for_each_panel(problem, kWidth, kTaskRows, [&](const ForwardTask& task) {
    const int64_t in = problem.in, n = task.row_end - task.row_begin;
    Buffer<float> panel(kPanelSize), near(n * kWidth, 0.0f), far(n * kWidth, 0.0f);
    for (int64_t from = 0; from < in; from += kInputBlock) {
      const int64_t to = std::min(in, from + kInputBlock);
      pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kWidth, from, to, panel.data());
      const float *lo[kBoxRows], *hi[kBoxRows];
      for (int64_t b = 0, rows; b < n; b += rows) {
        rows = n - b >= kBoxRows ? kBoxRows : 1;
        for (int64_t r = 0; r < rows; ++r) {
          lo[r] = problem.x + (task.row_begin + b + r) * in + from;
          hi[r] = box.x_hi + (task.row_begin + b + r) * in + from;
        }
        const auto run = rows == 1 ? accumulate_box<1> : accumulate_box<kBoxRows>;
        run(lo, hi, panel.data(), to - from, near.data() + b * kWidth, far.data() + b * kWidth);
      }
    }
    for (int64_t b = 0; b < n; ++b) {
      scatter_outputs(task, near.data() + b * kWidth, kWidth, y_lo + (task.row_begin + b) * problem.out);
      scatter_outputs(task, far.data() + b * kWidth, kWidth, y_hi + (task.row_begin + b) * problem.out);
    }
  });
}

// used[i]: whether input i can be the maximum of some row and output while x moves within the box, `least` being the least
// value of each maximum there (max_bounds). The farthest |x - w| of any other input is below it, so leaving those out changes
// no maximum, nor which input is the first to attain it.
inline void max_reach(const Box& box, const float* least, uint8_t* used) {
  constexpr int64_t kBlock = 256;  // inputs
  const Problem& problem = box.problem;
  const int64_t in = problem.in;
  parallel_for((in + kBlock - 1) / kBlock, problem.threads, [&](int64_t task) {
    const int64_t from = task * kBlock, count = std::min(kBlock, in - from);
    float ahead[kBlock + kLanes];  // by how much the farthest |x - w| exceeds the least maximum, at most
    std::fill(ahead, ahead + kBlock + kLanes, -1.0f);
    for (int64_t b = 0; b < problem.batch; ++b) {
      const float *lo = problem.x + b * in + from, *hi = box.x_hi + b * in + from;
      for (int64_t k = 0; k < problem.out; ++k) {
        const float* w = problem.w + k * in + from;
        const V bar = broadcast(least[b * problem.out + k]);
        const auto raise = [&](V low, V high, V weight, int64_t i) {
          const V far = maximum(high - weight, weight - low);
          store(ahead + i, maximum(load(ahead + i), far - bar));
        };
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) raise(load(lo + i), load(hi + i), load(w + i), i);
        if (i < count) raise(load_first(lo + i, count - i), load_first(hi + i, count - i), load_first(w + i, count - i), i);
      }
    }
    for (int64_t i = 0; i < count; ++i) used[from + i] = ahead[i] >= 0.0f;
  });
}

}  // namespace sortrl::SORTRL_ISA
