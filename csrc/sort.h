// The sort layer, y[b, k] = sum_j mix[j] * (j-th largest of |x[b] - w[k]|), its gradient, and ranges over a box.
//
// The K largest values of kLanes outputs are kept sorted in K registers, one output per lane; inserting a value into all
// lanes at once takes 2 K instructions and no branch. Two searches keep the insertions few:
//
// - By blocks, where K is small beside the number of blocks. The inputs are cut into at most 64 blocks. A first pass, as
//   fast as the max layer, finds the largest value of every block; the K-th largest of these maxima is a threshold that K
//   values reach for certain, and a block whose maximum is below it is not looked at again. Of 640 inputs and K = 12, 28 of
//   40 blocks are skipped, and 14 values are left to sort. Every output has its own list of them.
// - By a queue, otherwise. The threshold comes from 2 K groups of inputs, and the queue holds the inputs that reach it for
//   any output (a third of them, typically). It needs no list per output, which is slow to write with narrow vectors.
//
// A gradient needs to know which inputs the K largest are: these alone are listed and sorted with their numbers.
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

inline VI input_codes(VI number, V t) { return t == V{} ? VI{} + kFlat : number ^ (t < V{}); }

inline VI lane_numbers() {
  VI number;
  for (int l = 0; l < kLanes; ++l) number[l] = l;
  return number;
}

inline int64_t block_size(int64_t in) { return (in + 1023) / 1024 * 16; }

// Whether to search by blocks. Measured: AVX-512 compresses a vector into a list in one instruction; narrower vectors need
// a sharp threshold that leaves little to list, the more so if there is no other use for lists than this.
inline bool search_by_blocks(int64_t in, int64_t top, bool with_codes) {
  const int64_t blocks = (in + block_size(in) - 1) / block_size(in);
  if (top == 1) return true;
  if constexpr (kLanes >= 16) return blocks >= 12 && 4 * blocks >= 5 * top;
  return with_codes ? in >= 80 * top && blocks >= 3 * top : in >= 96 * top && blocks >= 4 * top;
}

// How inputs are searched, and a thread's memory for what it finds.
struct Search {
  const int64_t in, top, block, blocks;
  const bool by_blocks, with_lists;
  const int64_t width, stride;
  const float* panel = nullptr;  // (in, width): the weights of `width` outputs
  Buffer<float> maxima;    // (kRows, blocks, width): the largest value of every block
  Buffer<float> queue;     // (in + 1, kLanes): values of the queued inputs
  Buffer<int32_t> queued;  // (in + 1): the queued inputs, ascending
  int64_t queue_size = 0;
  Buffer<float> value;    // (kLanes, stride): lists of what reaches the threshold, per output
  Buffer<int32_t> code;   // (kLanes, stride): and which inputs these are
  int32_t count[kLanes];  // the lengths of the lists

  // Block maxima take two vectors of outputs at once. Strides are an odd number of cache lines: the same place of all
  // outputs must not fall into one set of the cache.
  Search(int64_t in, int64_t top, bool with_codes, bool by_blocks)
      : in(in), top(top), block(block_size(in)), blocks((in + block - 1) / block), by_blocks(by_blocks), with_lists(by_blocks || with_codes), width(by_blocks ? kWidth : kLanes),
        stride((((in + kLanes) / 16 + 1) | 1) * 16), maxima(by_blocks ? kRows * blocks * width : 0),
        queue(by_blocks ? 0 : (in + 1) * kLanes), queued(by_blocks ? 0 : in + 1),
        value(with_lists ? kLanes * stride : 0), code(with_lists ? kLanes * stride : 0) {}

  // Pack the weights of `width` outputs, from the first of the task, into (in, width).
  void pack(const Problem& problem, const ForwardTask& task, float* into) {
    const auto pack_to = [&](auto w) {  // faster with a constant width
      pack_panel(problem, *task.inputs, *task.outputs, task.first_output, w(), 0, in, into);
    };
    by_blocks ? pack_to(std::integral_constant<int64_t, kWidth>()) : pack_to(std::integral_constant<int64_t, kLanes>());
    panel = into;
  }
};

// Call run(task, search) for every panel, packed into `search`. At most `max_rows` rows share one packing.
template <class Run>
void for_each_search(const Problem& problem, int64_t top, bool with_codes, int64_t max_rows, const Run& run) {
  for_each_panel(problem, kWidth, max_rows, [&](ForwardTask task) {
    Search search(problem.in, top, with_codes, search_by_blocks(problem.in, top, with_codes));
    Buffer<float> panel(problem.in * search.width);
    const int64_t end = std::min(problem.out, task.first_output + kWidth);
    for (; task.first_output < end; task.first_output += search.width) {
      search.pack(problem, task, panel.data());
      run(task, search);
    }
  });
}

// The largest value of every block of inputs, for R rows against a panel.
template <int R, class Distance>
inline void block_maxima(const Distance& distance, const float* lo, const float* hi, Search& search) {
  const int64_t in = search.in;
  for (int64_t j = 0; j < search.blocks; ++j) {
    V a[R][kVectors] = {};
    for (int64_t i = j * search.block; i < std::min(in, (j + 1) * search.block); ++i) {
      V w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) w[v] = load(search.panel + i * kWidth + v * kLanes);
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
inline void insert(V* largest, VI* codes, V value, VI code) {
  Mask after = exceeds(value, largest[K - 1]);
#pragma GCC unroll 32
  for (int j = K - 1; j > 0; --j) {
    const Mask before = exceeds(value, largest[j - 1]);
    codes[j] = select(after, select(before, codes[j - 1], code), codes[j]);
    largest[j] = maximum(largest[j], minimum(largest[j - 1], value));
    after = before;
  }
  codes[0] = select(after, code, codes[0]);
  largest[0] = maximum(largest[0], value);
}

// List the values of one row and one output that reach `least`, in order of inputs; returns how many. Lanes are inputs.
template <bool WithCodes, class Distance>
inline int32_t list_values(const Distance& distance, const float* lo, const float* hi, const float* w,
                           const Search& search, uint64_t blocks, float least, float* value, int32_t* code) {
  const V bar = broadcast(least);
  int32_t count = 0;
  const auto append = [&](V from, V to, V weight, uint32_t lanes, int64_t first) {
    const V found = distance(from, to, weight);
    const VI codes = WithCodes ? input_codes(lane_numbers() + int32_t(first), from - weight) : VI{};
    count += compress(found, codes, lanes & lanes_at_least(found, bar), value + count,
                      WithCodes ? code + count : nullptr);
  };
  for (; blocks; blocks &= blocks - 1) {
    int64_t i = __builtin_ctzll(blocks) * search.block;
    const int64_t end = std::min(search.in, i + search.block), rest = (end - i) % kLanes;
    for (; i + kLanes <= end; i += kLanes) append(load(lo + i), load(hi + i), load(w + i), ~0u, i);
    if (rest) append(load_first(lo + i, rest), load_first(hi + i, rest), load_first(w + i, rest), (1u << rest) - 1, i);
  }
  return count;
}

// One row against as many outputs as there are lanes, or fewer; w is the first output's row of weights.
struct Lanes {
  const float *lo, *hi, *w;
  int64_t outputs;
};

// List the values of every output that reach its lane of `bar`. `blocks` has a bit per block and output.
template <bool WithCodes, class Distance>
inline void list_outputs(const Distance& distance, const Lanes& at, V bar, const uint64_t (&blocks)[kLanes],
                         Search& search) {
  float least[kLanes];
  store(least, bar);
  std::fill(search.count, search.count + kLanes, 0);
  for (int64_t l = 0; l < at.outputs; ++l)
    search.count[l] = list_values<WithCodes>(distance, at.lo, at.hi, at.w + l * search.in, search, blocks[l],
                                             least[l], search.value.data() + l * search.stride,
                                             search.code.data() + l * search.stride);
}

// The K largest values of every list, descending (-1 where there are fewer).
template <int K, bool WithCodes>
inline void sort_lists(const Search& search, V (&largest)[K], VI (&codes)[K]) {
  VI counts;
  std::memcpy(&counts, search.count, sizeof counts);
  const int32_t most = *std::max_element(search.count, search.count + kLanes);
  for (int j = 0; j < K; ++j) largest[j] = broadcast(-1.0f), codes[j] = VI{} + kFlat;
  const auto value_at = [&](int32_t c) {
    return counts > c ? load_strided(search.value.data() + c, search.stride) : broadcast(-1.0f);
  };
  const auto code_at = [&](int32_t c) { return load_strided(search.code.data() + c, search.stride); };
  int32_t c = 0;
  if constexpr (!WithCodes) {
    for (; c < most; ++c) insert<K>(largest, value_at(c));
  } else {
    // The first half of K values has no use for the other half of the registers.
    for (; K > 16 && c < std::min(most, K / 2); ++c) insert<(K + 1) / 2>(largest, codes, value_at(c), code_at(c));
    for (; c < most; ++c) insert<K>(largest, codes, value_at(c), code_at(c));
  }
}

// Search by blocks. `maxima` are the row's block maxima for these outputs.
template <int K, bool WithCodes, class Distance>
inline void top_k_by_blocks(const Distance& distance, const Lanes& at, const float* maxima, Search& search,
                            V (&largest)[K], VI (&codes)[K]) {
  for (int j = 0; j < K; ++j) largest[j] = broadcast(-1.0f);
  for (int64_t j = 0; j < search.blocks; ++j) insert<K>(largest, load(maxima + j * kWidth));
  if (search.top == 1 && !WithCodes) return;
  const V bar = largest[search.top - 1];
  uint64_t wanted[kLanes] = {};
  for (int64_t word = 0; word < 2; ++word) {
    VI bits{};
    for (int64_t j = 32 * word; j < std::min(search.blocks, 32 * (word + 1)); ++j)
      bits |= (VI)(load(maxima + j * kWidth) >= bar) & int32_t(1u << (j - 32 * word));
    for (int l = 0; l < kLanes; ++l) wanted[l] |= uint64_t(uint32_t(bits[l])) << (32 * word);
  }
  list_outputs<WithCodes>(distance, at, bar, wanted, search);
  sort_lists<K, WithCodes>(search, largest, codes);
}

// A lower bound of every lane's K-th largest value: the K-th largest of 2 K group maxima.
template <int K, class ValueAt>
inline V threshold(ValueAt value_at, int64_t n) {
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
      for (int j = 0; j < K; ++j) group[j] = maximum(group[j], value_at(i + j));
    }
    for (; i < end; ++i) group[0] = maximum(group[0], value_at(i));
    for (int j = 0; j < K; ++j) insert<K>(largest, group[j]);
  }
  return largest[K - 1];
}

// Queue the inputs that reach `bar` in some lane, without branching.
template <class ValueAt>
inline void fill_queue(ValueAt value_at, V bar, Search& search) {
  float* const queue = search.queue.data();
  int32_t* const queued = search.queued.data();
  int64_t size = 0;
  for (int64_t i = 0, in = search.in; i < in; ++i) {
    const V value = value_at(i);
    store(queue + size * kLanes, value);
    queued[size] = int32_t(i);
    size += any_at_least(value, bar);
  }
  search.queue_size = size;
}

// Drop the queued inputs that do not reach `bar` in any lane.
inline void tighten_queue(V bar, Search& search) {
  float* const queue = search.queue.data();
  int32_t* const queued = search.queued.data();
  int64_t size = 0;
  for (int64_t q = 0, end = search.queue_size; q < end; ++q) {
    const V value = load(queue + q * kLanes);
    store(queue + size * kLanes, value);
    queued[size] = queued[q];
    size += any_at_least(value, bar);
  }
  search.queue_size = size;
}

// List the queued values that reach `bar`, with their codes.
inline void list_queue(const Lanes& at, V bar, Search& search) {
  std::fill(search.count, search.count + kLanes, 0);
  for (int64_t q = 0; q < search.queue_size; ++q) {
    const float* value = search.queue.data() + q * kLanes;
    const int32_t i = search.queued[q];
    int32_t code[kLanes];
    const VI codes = input_codes(VI{} + i, broadcast(at.lo[i]) - load(search.panel + i * kLanes));
    std::memcpy(code, &codes, sizeof code);
    for (uint32_t lanes = lanes_at_least(load(value), bar); lanes; lanes &= lanes - 1) {
      const int l = __builtin_ctz(lanes);
      const int64_t place = l * search.stride + search.count[l]++;
      search.value[place] = value[l];
      search.code[place] = code[l];
    }
  }
}

// Search by a queue. Not inlined: beside the other search, its loops would run out of registers.
template <int K, bool WithCodes, class Distance>
__attribute__((noinline)) void top_k_by_queue(const Distance& distance, const Lanes& at, Search& search,
                                              V (&largest)[K], VI (&codes)[K]) {
  const auto value_at = [distance, lo = at.lo, hi = at.hi, panel = search.panel](int64_t i) {
    return distance(broadcast(lo[i]), broadcast(hi[i]), load(panel + i * kLanes));
  };
  // With few inputs nearly all would be queued; but more than 16 registers leave none to compute values in between.
  const bool many = search.in >= 6 * K, queue = many || K > 16;
  if (queue) fill_queue(value_at, many ? threshold<K>(value_at, search.in) : broadcast(-1.0f), search);
  V sorted[K];  // a local array, so that it stays in registers
  for (int j = 0; j < K; ++j) sorted[j] = broadcast(-1.0f);
  const float* const queued = search.queue.data();
  if (queue)
    for (int64_t q = 0, end = search.queue_size; q < end; ++q) insert<K>(sorted, load(queued + q * kLanes));
  else
    for (int64_t i = 0, end = search.in; i < end; ++i) insert<K>(sorted, value_at(i));
  std::copy(sorted, sorted + K, largest);
  if (!WithCodes) return;
  const V bar = largest[search.top - 1];
  if constexpr (kLanes >= 16) {
    uint64_t all[kLanes];
    std::fill(all, all + kLanes, ~uint64_t(0) >> (64 - search.blocks));
    list_outputs<true>(distance, at, bar, all, search);
  } else {
    queue ? tighten_queue(bar, search) : fill_queue(value_at, bar, search);
    list_queue(at, bar, search);
  }
  sort_lists<K, true>(search, largest, codes);
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
// of its outputs. The values descend; of K, the first `top` are right.
template <int K, bool WithCodes, class Distance, class Found>
void for_each_top_k(const Problem& problem, const float* x_hi, const ForwardTask& task, const Distance& distance,
                    Search& search, const Found& found) {
  const int64_t in = problem.in;
  for (int64_t b = task.row_begin, rows; b < task.row_end; b += rows) {
    rows = search.by_blocks && task.row_end - b >= kRows ? kRows : 1;
    const float *lo = problem.x + b * in, *hi = x_hi + b * in;
    if (search.by_blocks)
      rows == 1 ? block_maxima<1>(distance, lo, hi, search) : block_maxima<kRows>(distance, lo, hi, search);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < search.width && task.first_output + v < problem.out; v += kLanes) {
        const int64_t first = task.first_output + v, outputs = std::min<int64_t>(kLanes, problem.out - first);
        const Lanes lanes = {lo + r * in, hi + r * in, problem.w + first * in, outputs};
        V largest[K];
        VI codes[K];
        if (search.by_blocks)
          top_k_by_blocks<K, WithCodes>(distance, lanes, search.maxima.data() + r * search.blocks * kWidth + v, search,
                                        largest, codes);
        else
          top_k_by_queue<K, WithCodes>(distance, lanes, search, largest, codes);
        found(b + r, first, outputs, largest, codes);
      }
  }
}

constexpr int64_t kSortRows = 128;  // rows that share one packing of the weights

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
    for_each_search(problem, top, false, kSortRows, [&](const ForwardTask& task, Search& search) {
      for_each_top_k<k(), false>(problem, problem.x, task, PointDistance(), search,
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
      for_each_search(part, top, true, kSortRows / 4, [&](const ForwardTask& task, Search& search) {
        for_each_top_k<k(), true>(part, part.x, task, PointDistance(), search,
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

// The layer grows with every |x_i - w_i|, so its range over a box is attained at the nearest and farthest points.
inline void sort_bounds(const Box& box, const float* mix, int64_t top, float* y_lo, float* y_hi) {
  const Problem& problem = box.problem;
  with_static_top(top, [&](auto k) {
    for_each_search(problem, top, false, kSortRows, [&](const ForwardTask& task, Search& search) {
      const auto write_to = [&](float* y) {
        return [&, y](int64_t b, int64_t first, int64_t outputs, const V(&largest)[k()], const VI(&)[k()]) {
          write_mixed(largest, mix, top, y + b * problem.out + first, outputs);
        };
      };
      for_each_top_k<k(), false>(problem, box.x_hi, task, NearestDistance(), search, write_to(y_lo));
      for_each_top_k<k(), false>(problem, box.x_hi, task, FarthestDistance(), search, write_to(y_hi));
    });
  });
}

}  // namespace sortrl::SORTRL_ISA
