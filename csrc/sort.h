// The sort layer, y[b, k] = sum_j mix[j] * (j-th largest of |x[b] - w[k]|), its gradient, and ranges over a box.
//
// The inputs are cut into at most 64 blocks. A first pass, as fast as the max layer, finds the largest value of every
// block; the K-th largest of these maxima is a threshold that K values reach for certain, and a block whose maximum is
// below it is not looked at again. Of 640 inputs and K = 12, 28 of 40 blocks are skipped, and 14 values are left to sort.
// Sorting has one output per lane: the K largest values of a lane are kept sorted in K registers, and inserting a value
// into all lanes at once takes 2 K instructions and no branch.
#pragma once

#include <cstring>
#include <limits>

#include "max.h"

namespace sortrl::SORTRL_ISA {

// |x - w|, or its least and greatest value over a box. A point is a box whose corners coincide.
struct PointDistance {
  V operator()(V lo, V, V w) const { return absolute(lo - w); }
  V raise(V acc, V lo, V, V w) const { return max_with_abs(acc, lo - w); }
};

struct NearestDistance {
  V operator()(V lo, V hi, V w) const { return maximum(maximum(lo - w, w - hi), V{}); }
  V raise(V acc, V lo, V hi, V w) const { return maximum(acc, (*this)(lo, hi, w)); }
};

struct FarthestDistance {
  V operator()(V lo, V hi, V w) const { return maximum(absolute(lo - w), absolute(hi - w)); }
  V raise(V acc, V lo, V hi, V w) const { return maximum(acc, (*this)(lo, hi, w)); }
};

// An input as a gradient needs it: its number where x > w, the complement of it where x < w, and kFlat where x == w, as
// |x - w| has slope 0 there.
constexpr int32_t kFlat = std::numeric_limits<int32_t>::min();

inline VI input_codes(int64_t first, V t) {
  VI number;
  for (int l = 0; l < kLanes; ++l) number[l] = l;
  number += int32_t(first);
  return t == V{} ? VI{} + kFlat : number ^ (t < V{});
}

// How the inputs are cut into blocks, and a thread's memory for what it finds.
struct Search {
  const int64_t in, block, blocks, stride;
  Buffer<float> panel;   // (in, kWidth)
  Buffer<float> maxima;  // (kRows, blocks, kWidth): the largest value of every block
  Buffer<float> value;   // (kLanes, stride): what reaches the threshold, per output
  Buffer<int32_t> code;  // (kLanes, stride): and which input it is
  int32_t count[kLanes];  // how many, per output

  // Strides are an odd number of cache lines: the same place of all outputs must not fall into one set of the cache.
  explicit Search(int64_t in)
      : in(in), block((in + 1023) / 1024 * 16), blocks((in + block - 1) / block),
        stride((((in + kLanes) / 16 + 1) | 1) * 16), panel(in * kWidth), maxima(kRows * blocks * kWidth),
        value(kLanes * stride), code(kLanes * stride) {}
};

// The largest value of every block of inputs, for R rows against a panel.
template <int R, class Distance>
inline void block_maxima(const Distance& distance, const float* lo, const float* hi, Search& search) {
  const int64_t in = search.in;
  for (int64_t j = 0; j < search.blocks; ++j) {
    V a[R][kVectors] = {};
    for (int64_t i = j * search.block; i < std::min(in, (j + 1) * search.block); ++i) {
      V w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) w[v] = load(search.panel.data() + i * kWidth + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const V from = broadcast(lo[r * in + i]), to = broadcast(hi[r * in + i]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) a[r][v] = distance.raise(a[r][v], from, to, w[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        store(search.maxima.data() + (r * search.blocks + j) * kWidth + v * kLanes, a[r][v]);
  }
}

template <int K>
inline void insert(V (&largest)[K], V value) {
#pragma GCC unroll 32
  for (int j = K - 1; j > 0; --j) largest[j] = maximum(largest[j], minimum(largest[j - 1], value));
  largest[0] = maximum(largest[0], value);
}

// The same with codes that go with the values. Of equal values the earlier one stays ahead, as in a stable sort.
template <int K>
inline void insert(V (&largest)[K], VI (&codes)[K], V value, VI code) {
  Mask before[K];
#pragma GCC unroll 32
  for (int j = 0; j < K; ++j) before[j] = exceeds(value, largest[j]);
#pragma GCC unroll 32
  for (int j = K - 1; j > 0; --j) codes[j] = select(before[j], select(before[j - 1], codes[j - 1], code), codes[j]);
  codes[0] = select(before[0], code, codes[0]);
  insert<K>(largest, value);
}

// List the values of one row and one output that reach `least`, in order of inputs; returns how many. Lanes are inputs.
template <bool WithCodes, class Distance>
inline int32_t list_values(const Distance& distance, const float* lo, const float* hi, const float* w,
                           const Search& search, uint64_t blocks, float least, float* value, int32_t* code) {
  const V bar = broadcast(least);
  int32_t count = 0;
  const auto append = [&](V from, V to, V weight, uint32_t lanes, int64_t first) {
    const V found = distance(from, to, weight);
    count += compress(found, WithCodes ? input_codes(first, from - weight) : VI{}, lanes & lanes_at_least(found, bar),
                      value + count, WithCodes ? code + count : nullptr);
  };
  for (; blocks; blocks &= blocks - 1) {
    int64_t i = __builtin_ctzll(blocks) * search.block;
    const int64_t end = std::min(search.in, i + search.block), rest = (end - i) % kLanes;
    for (; i + kLanes <= end; i += kLanes) append(load(lo + i), load(hi + i), load(w + i), ~0u, i);
    if (rest) append(load_first(lo + i, rest), load_first(hi + i, rest), load_first(w + i, rest), (1u << rest) - 1, i);
  }
  return count;
}

// The K largest values of one row for `outputs` outputs, descending (-1 where there are fewer than K), of which the first
// `top` are right. `panel` and `maxima` are the packed weights of these outputs and the row's block maxima; w is the first
// output's row of weights.
template <int K, bool WithCodes, class Distance>
inline void top_k(const Distance& distance, const float* lo, const float* hi, const float* w, int64_t outputs,
                  const float* panel, const float* maxima, int64_t top, Search& search, V (&largest)[K], VI (&codes)[K]) {
  const int64_t blocks = search.blocks;
  V bar;
  uint32_t wanted[2][kLanes];  // one bit per block
  for (int j = 0; j < K; ++j) largest[j] = broadcast(-1.0f);
  if (blocks >= top) {
    for (int64_t j = 0; j < blocks; ++j) insert<K>(largest, load(maxima + j * kWidth));
    if (top == 1 && !WithCodes) return;
    bar = largest[top - 1];
    for (int64_t word = 0; word < 2; ++word) {
      VI bits{};
      for (int64_t j = 32 * word; j < std::min(blocks, 32 * (word + 1)); ++j)
        bits |= (VI)(load(maxima + j * kWidth) >= bar) & int32_t(1u << (j - 32 * word));
      std::memcpy(wanted[word], &bits, sizeof bits);
    }
  } else {  // too few blocks for a threshold
    for (int64_t i = 0; i < search.in; ++i)
      insert<K>(largest, distance(broadcast(lo[i]), broadcast(hi[i]), load(panel + i * kWidth)));
    if (!WithCodes) return;
    bar = largest[top - 1];
    std::fill(wanted[0], wanted[0] + kLanes, uint32_t((1u << blocks) - 1));
    std::fill(wanted[1], wanted[1] + kLanes, 0u);
  }
  float least[kLanes];
  store(least, bar);
  std::fill(search.count, search.count + kLanes, 0);
  int32_t most = 0;
  for (int64_t l = 0; l < outputs; ++l) {
    search.count[l] = list_values<WithCodes>(distance, lo, hi, w + l * search.in, search,
                                             uint64_t(wanted[1][l]) << 32 | wanted[0][l], least[l],
                                             search.value.data() + l * search.stride,
                                             search.code.data() + l * search.stride);
    most = std::max(most, search.count[l]);
  }
  VI counts;
  std::memcpy(&counts, search.count, sizeof counts);
  for (int j = 0; j < K; ++j) largest[j] = broadcast(-1.0f), codes[j] = VI{} + kFlat;
  for (int32_t c = 0; c < most; ++c) {
    const V value = counts > c ? load_strided(search.value.data() + c, search.stride) : broadcast(-1.0f);
    if constexpr (WithCodes)
      insert<K>(largest, codes, value, load_strided(search.code.data() + c, search.stride));
    else
      insert<K>(largest, value);
  }
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

// Call found(row, first output, outputs, largest values, codes of their inputs) for every row of a task and every kLanes
// of its outputs.
template <int K, bool WithCodes, class Distance, class Found>
void for_each_top_k(const Problem& problem, const float* x_hi, const ForwardTask& task, const Distance& distance,
                    int64_t top, Search& search, Found found) {
  const int64_t in = problem.in;
  for (int64_t b = task.row_begin, rows; b < task.row_end; b += rows) {
    rows = task.row_end - b >= kRows ? kRows : 1;
    const float *lo = problem.x + b * in, *hi = x_hi + b * in;
    if (search.blocks >= top)
      rows == 1 ? block_maxima<1>(distance, lo, hi, search) : block_maxima<kRows>(distance, lo, hi, search);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < kWidth && task.first_output + v < problem.out; v += kLanes) {
        const int64_t first = task.first_output + v, outputs = std::min<int64_t>(kLanes, problem.out - first);
        V largest[K];
        VI codes[K];
        const float* maxima = search.maxima.data() + r * search.blocks * kWidth + v;
        top_k<K, WithCodes>(distance, lo + r * in, hi + r * in, problem.w + first * in, outputs,
                            search.panel.data() + v, maxima, top, search, largest, codes);
        found(b + r, first, outputs, largest, codes);
      }
  }
}

constexpr int64_t kSortRows = 128;  // rows that share one packing of the weights

// Pack the panel of a task; the sort layer has no masks.
inline void pack_panel(const Problem& problem, const ForwardTask& task, Search& search) {
  pack_panel(problem, *task.inputs, *task.outputs, task.first_output, kWidth, 0, problem.in, search.panel.data());
}

template <int K>
inline void write_mixed(const V (&largest)[K], const float* mix, int64_t top, float* y, int64_t outputs) {
  V sum{};
  for (int64_t j = 0; j < top; ++j) sum += mix[j] * largest[j];
  float values[kLanes];
  store(values, sum);
  std::copy(values, values + outputs, y);
}

inline void sort_forward(const Problem& problem, const float* mix, int64_t top, float* y) {
  with_static_top(top, [&](auto k) {
    for_each_panel(problem, kWidth, kSortRows, [&](const ForwardTask& task) {
      Search search(problem.in);
      pack_panel(problem, task, search);
      for_each_top_k<k(), false>(problem, problem.x, task, PointDistance(), top, search,
                                 [&](int64_t b, int64_t first, int64_t outputs, const V(&largest)[k()], const VI(&)[k()]) {
                                   write_mixed(largest, mix, top, y + b * problem.out + first, outputs);
                                 });
    });
  });
}

inline void sort_backward(const Problem& problem, const float* mix, int64_t top, const float* grad, float* grad_x,
                          float* grad_w) {
  const int64_t in = problem.in, out = problem.out;
  // The two gradients are summed along different axes; each pass owns its results, so no two threads share one.
  Buffer<int32_t> chosen(std::min(problem.batch, kSortRows) * top * out);  // (row, rank, output): codes of inputs
  for (int64_t begin = 0; begin < problem.batch; begin += kSortRows) {
    Problem part = problem;
    part.x += begin * in;
    part.batch = std::min(kSortRows, problem.batch - begin);
    with_static_top(top, [&](auto k) {
      for_each_panel(part, kWidth, kSortRows / 4, [&](const ForwardTask& task) {
        Search search(in);
        pack_panel(part, task, search);
        for_each_top_k<k(), true>(part, part.x, task, PointDistance(), top, search,
                                  [&](int64_t b, int64_t first, int64_t outputs, const V(&)[k()], const VI(&codes)[k()]) {
                                    for (int64_t rank = 0; rank < top; ++rank)
                                      std::memcpy(chosen.data() + (b * top + rank) * out + first, &codes[rank],
                                                  size_t(outputs) * sizeof(int32_t));
                                  });
      });
    });
    // gradient[i] += sign * g * mix[rank] for the inputs of one row and output.
    const auto add = [&](int64_t b, int64_t k, float g, float* gradient) {
      for (int64_t rank = 0; rank < top; ++rank) {
        const int32_t code = chosen[(b * top + rank) * out + k], negative = code >> 31;  // all bits or none
        if (code == kFlat) continue;
        const float step = g * mix[rank], signed_step[2] = {step, -step};  // no branch: signs are random
        gradient[code ^ negative] += signed_step[negative & 1];
      }
    };
    constexpr int64_t kBlock = 16;
    if (grad_x)
      parallel_for((part.batch + kBlock - 1) / kBlock, problem.threads, [&](int64_t task) {
        for (int64_t b = task * kBlock; b < std::min(part.batch, (task + 1) * kBlock); ++b)
          for (int64_t k = 0; k < out; ++k) 
            add(b, k, grad[(begin + b) * out + k], grad_x + (begin + b) * in);
      });
    if (grad_w)
      parallel_for((out + kBlock - 1) / kBlock, problem.threads, [&](int64_t task) {
        for (int64_t b = 0; b < part.batch; ++b)
          for (int64_t k = task * kBlock; k < std::min(out, (task + 1) * kBlock); ++k)
            add(b, k, -grad[(begin + b) * out + k], grad_w + k * in);
      });
  }
}

// Both layers grow with every |x_i - w_i|, so their range over a box is attained at the nearest and farthest points.
// (The max layer is the sort layer with the mix {1}.)
inline void sort_bounds(const Box& box, const float* mix, int64_t top, float* y_lo, float* y_hi) {
  const Problem& problem = box.problem;
  with_static_top(top, [&](auto k) {
    for_each_panel(problem, kWidth, kSortRows, [&](const ForwardTask& task) {
      Search search(problem.in);
      pack_panel(problem, task, search);
      const auto write_to = [&](float* y) {
        return [&, y](int64_t b, int64_t first, int64_t outputs, const V(&largest)[k()], const VI(&)[k()]) {
          write_mixed(largest, mix, top, y + b * problem.out + first, outputs);
        };
      };
      for_each_top_k<k(), false>(problem, box.x_hi, task, NearestDistance(), top, search, write_to(y_lo));
      for_each_top_k<k(), false>(problem, box.x_hi, task, FarthestDistance(), top, search, write_to(y_hi));
    });
  });
}

}  // namespace sortrl::SORTRL_ISA
