// The l_p layer, y[b, k] = (sum_i |x[b, i] - w[k, i]|^p)^(1/p), and its gradient g sign(t) (|t| / y)^(p-1).
//
// Two ways to the same number. Up to p = 16 the powers are summed as they are: float32 has room for y between
// 2^(-96/p) and 2^(96/p), and a call that leaves this range is done again in the second way. There, a pass of the max
// layer comes first and everything is divided by the maximum, so that nothing overflows whatever p is. At large p almost
// every power is below the last bit of the sum; where a power is dear, only the inputs near the maximum are raised.
//
// Inputs that take few values in a batch need no power per row at all (levels.h). There, everything is divided by the largest
// |x - w| of a unit in the batch; a call in which some y is so much smaller that its powers would be lost is done again as above.
#pragma once

#include "max.h"
#include "power.h"

namespace sortrl::SORTRL_ISA {

constexpr float kSparseFrom = 64.0f;  // beyond this p, skipping small terms of a gradient pays for the test

// Terms with (|t| / max)^p < 2^-24 do not show in a float32 sum of positive terms.
inline float negligible_ratio(float p) { return std::exp2(-24.0f / p); }

inline bool in_raw_range(float y, float p) {
  const float room = std::exp2(96.0f / p);
  return y < room && y > 1.0f / room;
}

// y = total^(1/p), in place.
inline void take_root(float* total, int64_t n, float p) {
  const V inverse = broadcast(1.0f / p);
  for (int64_t j = 0; j < n; j += kLanes) {
    const V sum = load(total + j);
    if (p == 2.0f || p == 8.0f) {
      for (int l = 0; l < kLanes; ++l) {
        const float root = std::sqrt(sum[l]);
        total[j + l] = p == 2.0f ? root : std::sqrt(std::sqrt(root));
      }
    } else {
      store(total + j, exp2_of(log2_of(sum) * inverse));
    }
  }
}

template <int Base, int Doublings>
inline void sum_raw_powers(const Problem& problem, const ForwardTask& task, const Rows& rows, Buffer<float>& panel,
                           float* acc) {
  accumulate_task(problem, task, rows, panel, acc, [](V sum, V t) {
    const V root = even_power<Base>(t, Doublings - 1);
    return sum + root * root;
  });
}

// Returns whether every result was in the range where raw sums are exact enough.
template <int Base, int Doublings>
bool lp_forward_raw(const Problem& problem, float p, float* y) {
  std::atomic<bool> in_range{true};
  for_each_panel(problem, kWidth, kTaskRows, [&](const ForwardTask& task) {
    const FlushSubnormals guard;
    const Rows rows(problem.x, problem.in, *task.inputs, task.row_begin, task.row_end);
    const int64_t n = task.row_end - task.row_begin;
    Buffer<float> panel(kPanelSize), acc(n * kWidth, 0.0f);
    sum_raw_powers<Base, Doublings>(problem, task, rows, panel, acc.data());
    take_root(acc.data(), n * kWidth, p);
    bool good = true;
    for (int64_t j = 0; j < acc.size(); ++j) good &= in_raw_range(acc[j], p);
    if (!good) in_range = false;
    for (int64_t b = 0; b < n; ++b)
      scatter_outputs(task, acc.data() + b * kWidth, kWidth, y + (task.row_begin + b) * problem.out);
  });
  return in_range;
}

// total += sum_i (|t_i| / largest)^p for one row and the kWidth outputs of a panel. (Kept out of line: inlined into every
// caller, it crashes GCC 12.)
template <class Power>
__attribute__((noinline)) void sum_all_powers(const float* x, const float* panel, int64_t inputs, const float* largest, float* total,
                           Power power) {
  V sum[kVectors], inverse[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const V top = load(largest + v * kLanes);
    sum[v] = load(total + v * kLanes);
    inverse[v] = top > 0.0f ? reciprocal(top) : V{};
  }
  for (int64_t i = 0; i < inputs; ++i) {
    const V xi = broadcast(x[i]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[v] += power((xi - load(panel + i * kWidth + v * kLanes)) * inverse[v]);
  }
  for (int v = 0; v < kVectors; ++v) store(total + v * kLanes, sum[v]);
}

// The same for powers that are dear, be it for their size or for want of a multiplication chain: the terms that count are
// queued first, without branching, because whether one does is as good as random.
template <class Power>
__attribute__((noinline)) void sum_large_powers(const float* x, const float* panel, int64_t inputs, const float* largest, float ratio,
                             float* queue, float* total, Power power) {
  for (int64_t v = 0; v < kWidth; v += kLanes) {
    const V top = load(largest + v), cut = top * ratio;
    int64_t size = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      const V t = broadcast(x[i]) - load(panel + i * kWidth + v);
      store(queue + size * kLanes, t);
      size += any_at_least(absolute(t), cut);
    }
    const V inverse = top > 0.0f ? reciprocal(top) : V{};
    V sum = load(total + v);
    for (int64_t q = 0; q < size; ++q) sum += power(load(queue + q * kLanes) * inverse);
    store(total + v, sum);
  }
}

template <bool Dear, class Power>
void lp_forward_scaled(const Problem& problem, float p, float* y, Power power) {
  const float ratio = negligible_ratio(p);
  for_each_panel(problem, kWidth, kTaskRows, [&](const ForwardTask& task) {
    const FlushSubnormals guard;
    const Rows rows(problem.x, problem.in, *task.inputs, task.row_begin, task.row_end);
    const int64_t n = task.row_end - task.row_begin, inputs = task.inputs->size();
    Buffer<float> panel(kPanelSize), queue((kInputBlock + 1) * kLanes), largest(n * kWidth, 0.0f), total(n * kWidth, 0.0f);
    accumulate_task(problem, task, rows, panel, largest.data(), MaxStep());
    for (int64_t from = 0; from < inputs; from += kInputBlock) {
      const int64_t to = std::min(inputs, from + kInputBlock);
      if (inputs > kInputBlock)  // else the panel of the max pass is still there
        pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kWidth, from, to, panel.data());
      for (int64_t b = 0; b < n; ++b) {
        const float* tops = largest.data() + b * kWidth;
        if constexpr (Dear)
          sum_large_powers(rows[b] + from, panel.data(), to - from, tops, ratio, queue.data(), total.data() + b * kWidth, power);
        else
          sum_all_powers(rows[b] + from, panel.data(), to - from, tops, total.data() + b * kWidth, power);
      }
    }
    take_root(total.data(), n * kWidth, p);
    for (int64_t b = 0; b < n; ++b) {
      float* row = total.data() + b * kWidth;
      for (int64_t j = 0; j < kWidth; ++j) {
        const float top = largest[b * kWidth + j];
        row[j] = top > 0.0f ? top * row[j] : 0.0f;  // the sum is at least 1 there, so its root is finite
      }
      scatter_outputs(task, row, kWidth, y + (task.row_begin + b) * problem.out);
    }
  });
}

// A sum of powers of |t| / largest below this has lost too many of them.
constexpr float kLeastSum = 0x1p-90f;

// The largest |x - w| of the units in a panel; those beyond the last repeat it.
struct PanelScale {
  float largest[kWidth];
  V inverse[kVectors];

  PanelScale() = default;
  PanelScale(const Problem& problem, const Levels& levels, const Kept& outputs, int64_t first) {
    for (int64_t j = 0; j < kWidth; ++j)
      largest[j] = first + j < outputs.size() ? levels.farthest(problem.w + outputs.index[first + j] * problem.in, problem.in)
                                              : largest[j - 1];
    for (int v = 0; v < kVectors; ++v) {
      const V top = load(largest + v * kLanes);
      inverse[v] = top > 0.0f ? reciprocal(top) : V{};
    }
  }
};

// Returns whether every sum was large enough.
inline bool lp_forward_by_levels(const Problem& problem, const Levels& levels, AnyPower power, float* y) {
  std::atomic<bool> in_range{true};
  for_each_panel(problem, kWidth, kTaskRows, [&](const ForwardTask& task) {
    const FlushSubnormals guard;
    const Kept& rest = levels.rest();
    const int64_t n = task.row_end - task.row_begin;
    const PanelScale scale(problem, levels, *task.outputs, task.first_output);
    Buffer<float> panel(problem.in * kWidth), total(n * kWidth, 0.0f);
    pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kWidth, 0, problem.in, panel.data());
    accumulate_levels<kWidth>(
        levels, panel.data(), task.row_begin, task.row_end, total.data(),
        [&](V x, V w, int64_t v) { return power.even((x - w) * scale.inverse[v]); }, [](V a, V b) { return a + b; });
    if (rest.size() > 0) {
      const Rows rows(problem.x, problem.in, rest, task.row_begin, task.row_end);
      pack_panel(problem, rest, *task.outputs, task.first_output, kWidth, 0, rest.size(), panel.data());
      for (int64_t b = 0; b < n; ++b)
        sum_all_powers(rows[b], panel.data(), rest.size(), scale.largest, total.data() + b * kWidth,
                       [=](V s) { return power.even(s); });
    }
    bool good = true;
    for (int64_t j = 0; j < total.size(); ++j) good &= total[j] >= kLeastSum || scale.largest[j % kWidth] == 0.0f;
    if (!good) in_range = false;
    take_root(total.data(), n * kWidth, power.p);
    for (int64_t b = 0; b < n; ++b) {
      float* row = total.data() + b * kWidth;
      for (int64_t j = 0; j < kWidth; ++j) row[j] = scale.largest[j] > 0.0f ? scale.largest[j] * row[j] : 0.0f;
      scatter_outputs(task, row, kWidth, y + (task.row_begin + b) * problem.out);
    }
  });
  return in_range;
}

inline void lp_forward(const Problem& problem, float p, float* y) {
  if (const Levels levels(problem); levels) {
    if (lp_forward_by_levels(problem, levels, AnyPower(p), y)) return;
  }
  const bool done = p == 2.0f    ? lp_forward_raw<1, 1>(problem, p, y)
                    : p == 4.0f  ? lp_forward_raw<1, 2>(problem, p, y)
                    : p == 6.0f  ? lp_forward_raw<3, 1>(problem, p, y)
                    : p == 8.0f  ? lp_forward_raw<1, 3>(problem, p, y)
                    : p == 12.0f ? lp_forward_raw<3, 2>(problem, p, y)
                    : p == 16.0f ? lp_forward_raw<1, 4>(problem, p, y)
                                 : false;
  if (done) return;
  with_power(p, [&](auto power) {
    lp_forward_scaled<decltype(power)::dear>(problem, p, y, [=](V s) { return power.even(s); });
  });
}

// Backward. Lanes run over inputs, so that one power serves both gradients: grad_x sums it over outputs in memory and
// grad_w over rows in registers. A task owns a range of inputs, hence no result is shared between threads.
#if defined(__AVX512F__)
constexpr int kOutputs = 8;
#else
constexpr int kOutputs = 4;
#endif

// Per (row, output): what the power is multiplied with, and for the scaled way 1 / y and the negligible size of |t|.
struct Factors {
  std::vector<float> weight, inverse, cut;  // (batch, out padded to kOutputs), rows of one block adjacent
};

template <bool Scaled, bool Sparse, class Power>
void lp_backward_strip(const float* x, int64_t rows, const float* w, const float* weight, const float* inverse,
                       const float* cut, float* grad_x, float* grad_w, Power power) {
  V gw[kOutputs], wk[kOutputs];
#pragma GCC unroll 8
  for (int k = 0; k < kOutputs; ++k) gw[k] = V{}, wk[k] = load(w + k * kLanes);
  for (int64_t b = 0; b < rows; ++b) {
    const V xb = load(x + b * kLanes);
    V gx = load(grad_x + b * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kOutputs; ++k) {
      V t = xb - wk[k];
      if (Sparse && !any_at_least(absolute(t), broadcast(cut[b * kOutputs + k]))) continue;
      if (Scaled) t *= inverse[b * kOutputs + k];
      const V u = power(t);
      const V h = broadcast(weight[b * kOutputs + k]);
      gx += h * u;
      gw[k] -= h * u;
    }
    store(grad_x + b * kLanes, gx);
  }
#pragma GCC unroll 8
  for (int k = 0; k < kOutputs; ++k) store(grad_w + k * kLanes, gw[k]);
}

inline bool adjacent(const int32_t* columns, int64_t count) {
  return count == kLanes && columns[kLanes - 1] - columns[0] == kLanes - 1;
}

// Copy rows[r][columns[l]] for the lanes of a strip; absent lanes are 0 on both sides, so their gradient is 0.
inline V gather(const float* row, const int32_t* columns, int64_t count) {
  if (adjacent(columns, count)) return load(row + columns[0]);
  float lanes[kLanes] = {};
  for (int64_t l = 0; l < count; ++l) lanes[l] = row[columns[l]];
  return load(lanes);
}

inline void scatter_add(V value, float* row, const int32_t* columns, int64_t count) {
  if (adjacent(columns, count)) return store(row + columns[0], load(row + columns[0]) + value);
  float lanes[kLanes];
  store(lanes, value);
  for (int64_t l = 0; l < count; ++l) row[columns[l]] += lanes[l];
}

// The strips of kLanes kept inputs that a task works on in one chunk, with the weights of all outputs for them. They are
// copied in and out row by row, because a strip alone touches a cache line per output and waits for each.
struct Strips {
  const int32_t* columns;
  int64_t count, outputs;
  Buffer<float> w, grad_w;  // (strips, outputs padded to kOutputs, kLanes)

  Strips(const int32_t* columns, int64_t count, int64_t outputs)
      : columns(columns), count(count), outputs(outputs), w(size() * padded() * kLanes), grad_w(size() * padded() * kLanes) {}

  int64_t size() const { return (count + kLanes - 1) / kLanes; }
  int64_t padded() const { return (outputs + kOutputs - 1) / kOutputs * kOutputs; }
  int64_t lanes(int64_t strip) const { return std::min<int64_t>(kLanes, count - strip * kLanes); }
  int64_t at(int64_t strip, int64_t k) const { return (strip * padded() + k) * kLanes; }

  void read(const Problem& problem, const Kept& kept) {
    for (int64_t k = 0; k < padded(); ++k) {
      const float* row = problem.w + kept.index[std::min(k, outputs - 1)] * problem.in;
      for (int64_t s = 0; s < size(); ++s) store(w.data() + at(s, k), gather(row, columns + s * kLanes, lanes(s)));
    }
  }

  void add_to(float* gradient, const Problem& problem, const Kept& kept) const {
    for (int64_t k = 0; k < outputs; ++k)
      for (int64_t s = 0; s < size(); ++s)
        scatter_add(load(grad_w.data() + at(s, k)), gradient + kept.index[k] * problem.in, columns + s * kLanes, lanes(s));
  }
};

template <bool Scaled, bool Sparse, class Power>
void lp_backward_columns(const Problem& problem, const std::vector<Kept>& inputs, const std::vector<Kept>& outputs,
                         const Factors& factors, int64_t from, int64_t to, float* grad_x, float* grad_w, Power power) {
  const FlushSubnormals guard;
  const int64_t blocks = (problem.out + kOutputs - 1) / kOutputs, chunk_rows = problem.chunk_rows();
  Buffer<float> x(chunk_rows * kLanes), gx(chunk_rows * kLanes);
  for (int64_t c = 0; c < problem.chunks; ++c) {
    const int64_t begin = c * chunk_rows, rows = std::min(problem.batch - begin, chunk_rows);
    const auto& kept = inputs[c].index;
    const auto first = std::lower_bound(kept.begin(), kept.end(), from), last = std::lower_bound(first, kept.end(), to);
    if (rows <= 0 || first == last || outputs[c].size() == 0) continue;
    Strips strips(&*first, last - first, outputs[c].size());
    strips.read(problem, outputs[c]);
    for (int64_t s = 0; s < strips.size(); ++s) {
      const int32_t* columns = strips.columns + s * kLanes;
      for (int64_t b = 0; b < rows; ++b)
        store(x.data() + b * kLanes, gather(problem.x + (begin + b) * problem.in, columns, strips.lanes(s)));
      std::fill(gx.data(), gx.data() + gx.size(), 0.0f);
      for (int64_t k = 0; k < strips.outputs; k += kOutputs) {
        const int64_t at = (begin * blocks + k / kOutputs * rows) * kOutputs;
        lp_backward_strip<Scaled, Sparse>(x.data(), rows, strips.w.data() + strips.at(s, k), factors.weight.data() + at,
                                          Scaled ? factors.inverse.data() + at : nullptr,
                                          Sparse ? factors.cut.data() + at : nullptr, gx.data(),
                                          strips.grad_w.data() + strips.at(s, k), power);
      }
      if (grad_x)
        for (int64_t b = 0; b < rows; ++b)
          scatter_add(load(gx.data() + b * kLanes), grad_x + (begin + b) * problem.in, columns, strips.lanes(s));
    }
    if (grad_w) strips.add_to(grad_w, problem, outputs[c]);
  }
}

// weight = grad / y^(p-1) in the raw way; grad, 1 / y and the cut in the scaled way. Absent outputs get weight 0.
template <class RawWeight>
Factors lp_factors(const Problem& problem, const std::vector<Kept>& outputs, const float* y, const float* grad,
                   bool scaled, float ratio, RawWeight raw_weight) {
  const int64_t blocks = (problem.out + kOutputs - 1) / kOutputs, chunk_rows = problem.chunk_rows();
  const int64_t size = problem.batch * blocks * kOutputs + kLanes;
  Factors factors;
  factors.weight.resize(size);
  if (scaled) factors.inverse.resize(size), factors.cut.resize(size);
  parallel_for(problem.chunks * blocks, problem.threads, [&](int64_t task) {
    const int64_t c = task / blocks, k = task % blocks * kOutputs, begin = c * chunk_rows;
    const int64_t rows = std::min(problem.batch - begin, chunk_rows);
    for (int64_t b = 0; b < rows; ++b)
      for (int64_t j = 0; j < kOutputs && k + j < outputs[c].size(); ++j) {
        const int64_t from = (begin + b) * problem.out + outputs[c].index[k + j];
        const int64_t at = (begin * blocks + k / kOutputs * rows + b) * kOutputs + j;
        const float value = y[from];
        factors.weight[at] = scaled ? (value > 0.0f ? grad[from] : 0.0f) : grad[from] * raw_weight(1.0f / value);
        if (scaled) {
          factors.inverse[at] = value > 0.0f ? 1.0f / value : 0.0f;
          factors.cut[at] = value * ratio;
        }
      }
  });
  return factors;
}

template <bool Scaled, bool Sparse, class Power>
void lp_backward_with(const Problem& problem, const std::vector<Kept>& inputs, float p, const float* y, const float* grad,
                      float* grad_x, float* grad_w, Power power) {
  const auto outputs = kept_per_chunk(problem.out_keep, problem.chunks, problem.out);
  const auto raw_weight = [&](float inverse) { return power(broadcast(inverse))[0]; };
  const Factors factors = lp_factors(problem, outputs, y, grad, Scaled, negligible_ratio(p - 1.0f), raw_weight);
  // The strips must not depend on the number of threads: which small terms are skipped depends on their neighbours.
  constexpr int64_t width = 64;
  parallel_for((problem.in + width - 1) / width, problem.threads, [&](int64_t task) {
    lp_backward_columns<Scaled, Sparse>(problem, inputs, outputs, factors, task * width,
                                        std::min(problem.in, (task + 1) * width), grad_x, grad_w, power);
  });
}

template <class Power>
void lp_backward_scaled(const Problem& problem, const std::vector<Kept>& inputs, float p, const float* y, const float* grad,
                        float* grad_x, float* grad_w, Power power) {
  const auto run = p > kSparseFrom ? lp_backward_with<true, true, Power> : lp_backward_with<true, false, Power>;
  run(problem, inputs, p, y, grad, grad_x, grad_w, power);
}

// The gradients that these inputs have a part in.
inline void lp_backward_of(const Problem& problem, const std::vector<Kept>& inputs, float p, const float* y, const float* grad,
                           float* grad_x, float* grad_w) {
  bool raw = p <= 16.0f;
  for (int64_t b = 0; raw && b < problem.batch; ++b)
    for (int64_t k = 0; k < problem.out; ++k)
      if (!problem.out_keep || problem.out_keep[b / problem.chunk_rows() * problem.out + k])
        raw &= in_raw_range(y[b * problem.out + k], p);
#define SORTRL_RAW(P, BASE, DOUBLINGS)                                                      \
  if (raw && p == P)                                                                        \
    return lp_backward_with<false, false>(problem, inputs, p, y, grad, grad_x, grad_w, [](V t) { return odd_power<BASE>(t, DOUBLINGS); });
  SORTRL_RAW(2.0f, 1, 1)
  SORTRL_RAW(4.0f, 1, 2)
  SORTRL_RAW(6.0f, 3, 1)
  SORTRL_RAW(8.0f, 1, 3)
  SORTRL_RAW(12.0f, 3, 2)
  SORTRL_RAW(16.0f, 1, 4)
#undef SORTRL_RAW
  with_power(p, [&](auto power) {
    lp_backward_scaled(problem, inputs, p, y, grad, grad_x, grad_w, [=](V s) { return power.odd(s); });
  });
}

// The gradient of w, for inputs that take few values: what a unit's rows weigh is summed for every value, then multiplied with
// the power of that value's distance. Returns false, with nothing done, where some y is too small beside its unit's scale.
inline bool lp_backward_by_levels(const Problem& problem, const Levels& levels, AnyPower power, const float* y,
                                  const float* grad, float* grad_w) {
  const int64_t in = problem.in, out = problem.out, chunk_rows = problem.chunk_rows(), panels = (out + kWidth - 1) / kWidth;
  const auto inputs = kept_per_chunk(nullptr, 1, in);
  const auto outputs = kept_per_chunk(problem.out_keep, problem.chunks, out);
  Kept all = kept_per_chunk(nullptr, 1, out)[0];
  std::vector<PanelScale> scales(panels, PanelScale());
  std::atomic<bool> in_range{true};
  const float most = std::exp2(90.0f / power.p);
  parallel_for(panels, problem.threads, [&](int64_t panel) {
    const int64_t first = panel * kWidth, end = std::min(out, first + kWidth);
    scales[panel] = PanelScale(problem, levels, all, first);
    bool good = true;
    for (int64_t b = 0; b < problem.batch; ++b)
      for (int64_t k = first; k < end; ++k) {
        const float largest = scales[panel].largest[k - first];
        const bool kept = !problem.out_keep || problem.out_keep[b / chunk_rows * out + k];
        good &= !kept || y[b * out + k] * most >= largest;
      }
    if (!good) in_range = false;
  });
  if (!in_range) return false;
  parallel_for(panels, problem.threads, [&](int64_t panel) {
    const FlushSubnormals guard;
    const int64_t first = panel * kWidth, end = std::min(out, first + kWidth);
    const PanelScale& scale = scales[panel];
    Buffer<float> w(in * kWidth), gradient((in + 3) * kWidth, 0.0f), weight(chunk_rows * kWidth);
    pack_panel(problem, inputs[0], all, first, kWidth, 0, in, w.data());
    for (int64_t c = 0; c < problem.chunks; ++c) {
      const int64_t begin = c * chunk_rows, rows = std::min(problem.batch - begin, chunk_rows);
      std::fill(weight.data(), weight.data() + weight.size(), 0.0f);
      for (int64_t b = 0; b < rows; ++b) {
        float g[kWidth] = {}, of[kWidth] = {};
        std::copy(grad + (begin + b) * out + first, grad + (begin + b) * out + end, g);
        std::copy(y + (begin + b) * out + first, y + (begin + b) * out + end, of);
        for (int64_t k = first; problem.out_keep && k < end; ++k)
          if (!problem.out_keep[c * out + k]) of[k - first] = 0.0f;
        for (int64_t v = 0; v < kWidth; v += kLanes) {
          const V value = load(of + v), ratio = value > 0.0f ? load(scale.largest + v) / value : V{};
          store(weight.data() + b * kWidth + v, load(g + v) * power.odd(ratio));
        }
      }
      if (rows > 0)
        sum_by_level<kWidth>(levels, begin, begin + rows, weight.data(), [&](const Levels::Member& member, int32_t j, int64_t v, V sum) {
          float* to = gradient.data() + member.input * kWidth + v * kLanes;
          const V t = broadcast(member.value[j]) - load(w.data() + member.input * kWidth + v * kLanes);
          store(to, load(to) - sum * power.odd(t * scale.inverse[v]));
        });
    }
    for (int64_t i = 0; i < in; i += 4)
      for (int64_t k = first; k < end; k += 4) {
        float corner[16];
        const float* from = gradient.data() + i * kWidth + k - first;
        const float* rows[4] = {from, from + kWidth, from + 2 * kWidth, from + 3 * kWidth};
        transpose_4x4(rows, corner, 4);
        for (int64_t r = 0; r < std::min<int64_t>(4, end - k); ++r)
          for (int64_t l = 0; l < std::min<int64_t>(4, in - i); ++l) grad_w[(k + r) * in + i + l] += corner[4 * r + l];
      }
  });
  return true;
}

inline void lp_backward(const Problem& problem, float p, const float* y, const float* grad, float* grad_x,
                        float* grad_w) {
  if (grad_w && !grad_x) {
    if (const Levels levels(problem); levels) {
      const bool done = lp_backward_by_levels(problem, levels, AnyPower(p), y, grad, grad_w);
      if (done && levels.rest().size() > 0)
        lp_backward_of(problem, std::vector<Kept>(problem.chunks, levels.rest()), p, y, grad, nullptr, grad_w);
      if (done) return;
    }
  }
  lp_backward_of(problem, kept_per_chunk(problem.in_keep, problem.chunks, problem.in), p, y, grad, grad_x, grad_w);
}

}  // namespace sortrl::SORTRL_ISA
