// The sort layer, y[b, k] = sum_j mix[j] * (j-th largest of |x[b] - w[k]|), its gradient, and ranges over a box.
//
// One lane is one output. The K largest values of a lane are kept sorted in K registers; inserting a value into all
// lanes at once takes 2 K instructions and no branch. To insert rarely, a first pass over 2 K groups of inputs finds
// a threshold that the K-th largest value cannot fall below; the second pass queues only the inputs that reach it in
// some lane (a third of them, typically), without branching.
#pragma once

#include "tile.h"

namespace sortrl::SORTRL_ISA {

// Values of one row against one panel of kLanes outputs: |x - w|, or its least and greatest value over a box.
struct PointDistance {
  const float* x;
  const float* panel;
  V signed_at(int64_t i) const { return broadcast(x[i]) - load(panel + i * kLanes); }
  V operator()(int64_t i) const { return absolute(signed_at(i)); }
};

struct NearestDistance {
  const float *lo, *hi, *panel;
  V operator()(int64_t i) const {
    const V w = load(panel + i * kLanes);
    return maximum(maximum(broadcast(lo[i]) - w, w - broadcast(hi[i])), V{});
  }
};

struct FarthestDistance {
  const float *lo, *hi, *panel;
  V operator()(int64_t i) const {
    const V w = load(panel + i * kLanes);
    return maximum(absolute(broadcast(lo[i]) - w), absolute(broadcast(hi[i]) - w));
  }
};

// Single values that reach the last rank of their lane, in order of inputs and lanes.
struct Hits {
  Buffer<float> value;
  Buffer<int32_t> lane, input;

  explicit Hits(int64_t capacity) : value(capacity), lane(capacity), input(capacity) {}
};

// Inputs that may hold one of the K largest values of some lane, with their values.
struct Queue {
  Buffer<float> values;   // (capacity, kLanes)
  Buffer<int32_t> input;  // (capacity)
  Hits hits;
  int64_t size = 0;

  // Only gradients need room for hits.
  explicit Queue(int64_t capacity, bool with_hits = false)
      : values((capacity + 1) * kLanes), input(capacity + 1), hits(with_hits ? (capacity + 1) * kLanes : 0) {}
};

template <int K>
inline void insert(V (&largest)[K], V value) {
#pragma GCC unroll 32
  for (int j = K - 1; j > 0; --j) largest[j] = maximum(largest[j], minimum(largest[j - 1], value));
  largest[0] = maximum(largest[0], value);
}

// A lower bound of every lane's K-th largest value: the K-th largest of 2 K group maxima.
template <int K, class Distance>
inline V threshold(const Distance& distance, int64_t n) {
  V largest[K], group[K];
  for (int j = 0; j < K; ++j) largest[j] = broadcast(-1.0f);
  const int64_t half = n / 2;
  for (int round = 0; round < 2; ++round) {
    int64_t i = round ? half : 0;
    const int64_t end = round ? n : half;
#pragma GCC unroll 32
    for (int j = 0; j < K; ++j) group[j] = broadcast(-1.0f);
    for (; i + K <= end; i += K) {
#pragma GCC unroll 32
      for (int j = 0; j < K; ++j) group[j] = maximum(group[j], distance(i + j));
    }
    for (; i < end; ++i) group[0] = maximum(group[0], distance(i));
    for (int j = 0; j < K; ++j) insert<K>(largest, group[j]);
  }
  return largest[K - 1];
}

// The K largest values of every lane, descending (-1 where there are fewer than K), and the queue they came from.
template <int K, class Distance>
inline void top_k(const Distance& distance, int64_t n, Queue& queue, V (&largest)[K]) {
  const V least = n >= 6 * K ? threshold<K>(distance, n) : broadcast(-1.0f);
  int64_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const V value = distance(i);
    store(queue.values.data() + size * kLanes, value);
    queue.input[size] = int32_t(i);
    size += any_at_least(value, least);
  }
  queue.size = size;
  for (int j = 0; j < K; ++j) largest[j] = broadcast(-1.0f);
  for (int64_t q = 0; q < size; ++q) insert<K>(largest, load(queue.values.data() + q * kLanes));
}

// Call `body` with the smallest compiled K that is at least `top`.
template <class Body>
void with_static_top(int64_t top, Body body) {
  if (top <= 1) return body(std::integral_constant<int, 1>());
  if (top <= 4) return body(std::integral_constant<int, 4>());
  if (top <= 8) return body(std::integral_constant<int, 8>());
  if (top <= 12) return body(std::integral_constant<int, 12>());
  if (top <= 16) return body(std::integral_constant<int, 16>());
  body(std::integral_constant<int, kMaxTop>());
}

template <int K>
inline V mixed(const V (&largest)[K], const float* mix, int64_t top) {
  V y{};
  for (int64_t j = 0; j < top; ++j) y += mix[j] * largest[j];
  return y;
}

inline void sort_forward(const Problem& problem, const float* mix, int64_t top, float* y) {
  with_static_top(top, [&](auto k) {
    for_each_panel(problem, kLanes, 128, [&](const ForwardTask& task) {
      const Rows rows(problem.x, problem.in, *task.inputs, task.row_begin, task.row_end);
      const int64_t n = task.inputs->size();
      Buffer<float> panel(n * kLanes);
      pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kLanes, 0, n, panel.data());
      Queue queue(n);
      V largest[k()];
      float values[kLanes];
      for (int64_t b = task.row_begin; b < task.row_end; ++b) {
        top_k<k()>(PointDistance{rows[b - task.row_begin], panel.data()}, n, queue, largest);
        store(values, mixed(largest, mix, top));
        scatter_outputs(task, values, kLanes, y + b * problem.out);
      }
    });
  });
}

// One row against one panel: send grad * mix[rank] to the position of each of the `top` largest values. Among equal
// values the lower input has the better rank, as in a stable sort.
template <int K>
inline void spread_gradient(const PointDistance& distance, int64_t n, Queue& queue, const float* mix, int64_t top,
                            const float* grad, int64_t outputs, float* grad_x, float* grad_w, int64_t in) {
  V largest[K];
  top_k<K>(distance, n, queue, largest);
  constexpr int kStride = (K + kLanes - 1) / kLanes * kLanes;
  float ranked[kLanes][kStride];  // lane-major, so that one comparison looks at all ranks of a lane
  float column[kLanes];
  for (int j = 0; j < kStride; ++j) {
    store(column, j < top ? largest[std::min(j, K - 1)] : broadcast(-1.0f));
    for (int l = 0; l < kLanes; ++l) ranked[l][j] = column[l];
  }
  // First list the values that reach the last rank, without branching on how many an input has; then rank them.
  Hits& hits = queue.hits;
  const V last = largest[top - 1];
  int64_t count = 0;
  for (int64_t q = 0; q < queue.size; ++q) {
    const V values = load(queue.values.data() + q * kLanes);
    count += compress(values, lanes_at_least(values, last), queue.input[q], hits.value.data() + count,
                      hits.lane.data() + count, hits.input.data() + count);
  }
  uint32_t used[kLanes] = {};
  for (int64_t h = 0; h < count; ++h) {
    const int lane = hits.lane[h];
    const int64_t i = hits.input[h];
    if (lane >= outputs) continue;
    uint32_t ranks = 0;
    for (int j = 0; j < kStride; j += kLanes)
      ranks |= lanes_equal(load(ranked[lane] + j), broadcast(hits.value[h])) << j;
    ranks &= ~used[lane];
    if (!ranks) continue;  // a tie with the last rank, which a lower input has taken
    const int rank = __builtin_ctz(ranks);
    used[lane] |= 1u << rank;
    const float g = with_sign(grad[lane] * mix[rank], distance.x[i] - distance.panel[i * kLanes + lane]);
    if (grad_x) grad_x[i] += g;
    if (grad_w) grad_w[lane * in + i] -= g;
  }
}

inline void sort_backward(const Problem& problem, const float* mix, int64_t top, const float* grad, float* grad_x,
                          float* grad_w) {
  const int64_t in = problem.in, out = problem.out, panels = (out + kLanes - 1) / kLanes;
  const auto inputs = kept_per_chunk(nullptr, 1, in), outputs = kept_per_chunk(nullptr, 1, out);
  with_static_top(top, [&](auto k) {
    // The two gradients are summed along different axes; each pass owns its results, so no two threads share one.
    const auto rows_against_panel = [&](int64_t row_begin, int64_t row_end, int64_t panel_index, float* gx, float* gw,
                                        Buffer<float>& panel, Queue& queue) {
      const int64_t first = panel_index * kLanes;
      pack_panel(problem, inputs[0], outputs[0], first, kLanes, 0, in, panel.data());
      for (int64_t b = row_begin; b < row_end; ++b)
        spread_gradient<k()>(PointDistance{problem.x + b * in, panel.data()}, in, queue, mix, top,
                             grad + b * out + first, std::min<int64_t>(kLanes, out - first),
                             gx ? gx + b * in : nullptr, gw ? gw + first * in : nullptr, in);
    };
    constexpr int64_t kRowsPerTask = 16;
    if (grad_x)
      parallel_for((problem.batch + kRowsPerTask - 1) / kRowsPerTask, problem.threads, [&](int64_t task) {
        Buffer<float> panel(in * kLanes);
        Queue queue(in, true);
        const int64_t begin = task * kRowsPerTask, end = std::min(problem.batch, begin + kRowsPerTask);
        for (int64_t p = 0; p < panels; ++p) rows_against_panel(begin, end, p, grad_x, nullptr, panel, queue);
      });
    if (grad_w)
      parallel_for(panels, problem.threads, [&](int64_t p) {
        Buffer<float> panel(in * kLanes);
        Queue queue(in, true);
        rows_against_panel(0, problem.batch, p, nullptr, grad_w, panel, queue);
      });
  });
}

// Both layers grow with every |x_i - w_i|, so their range over a box is attained at the nearest and farthest points.
// (The max layer is the sort layer with the mix {1}.)
inline void sort_bounds(const Box& box, const float* mix, int64_t top, float* y_lo, float* y_hi) {
  const Problem& problem = box.problem;
  with_static_top(top, [&](auto k) {
    for_each_panel(problem, kLanes, 128, [&](const ForwardTask& task) {
      const int64_t n = problem.in;
      Buffer<float> panel(n * kLanes);
      pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kLanes, 0, n, panel.data());
      Queue queue(n);
      V largest[k()];
      float values[kLanes];
      for (int64_t b = task.row_begin; b < task.row_end; ++b) {
        const float *lo = problem.x + b * n, *hi = box.x_hi + b * n;
        top_k<k()>(NearestDistance{lo, hi, panel.data()}, n, queue, largest);
        store(values, mixed(largest, mix, top));
        scatter_outputs(task, values, kLanes, y_lo + b * problem.out);
        top_k<k()>(FarthestDistance{lo, hi, panel.data()}, n, queue, largest);
        store(values, mixed(largest, mix, top));
        scatter_outputs(task, values, kLanes, y_hi + b * problem.out);
      }
    });
  });
}

}  // namespace sortrl::SORTRL_ISA
