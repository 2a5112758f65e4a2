// What all kernels share: which inputs and outputs a chunk uses, and weights packed so that one vector holds the
// same input of several outputs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "simd.h"

namespace sortrl::SORTRL_ISA {

// Scratch memory aligned to a cache line, so that no vector straddles two. Contents are undefined until written.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(nullptr), size_(size) {
    if (size == 0) return;
    const size_t bytes = (size_t(size) * sizeof(T) + 63) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!data_) throw std::bad_alloc();
  }
  Buffer(int64_t size, T value) : Buffer(size) { std::fill(data_, data_ + size, value); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return size_; }

 private:
  T* data_;
  int64_t size_;
};

// The kept positions of one chunk's mask, ascending; all of them where there is no mask.
struct Kept {
  std::vector<int32_t> index;
  bool all = true;

  int64_t size() const { return int64_t(index.size()); }
};

inline std::vector<Kept> kept_per_chunk(const uint8_t* keep, int64_t chunks, int64_t n) {
  std::vector<Kept> kept(chunks);
  for (int64_t c = 0; c < chunks; ++c) {
    kept[c].index.reserve(n);
    for (int64_t i = 0; i < n; ++i)
      if (!keep || keep[c * n + i]) kept[c].index.push_back(int32_t(i));
    kept[c].all = kept[c].size() == n;
  }
  return kept;
}

// panel[i * width + j] = w[outputs[first + j], inputs[i]] for i in [from, to). Surplus columns repeat the last output:
// harmless numbers that nobody reads.
inline void pack_panel(const Problem& problem, const Kept& inputs, const Kept& outputs, int64_t first, int64_t width,
                       int64_t from, int64_t to, float* panel) {
  constexpr int64_t kBlock = 64;  // inputs at a time: the lines being written stay in the first-level cache
  for (int64_t block = from; block < to; block += kBlock) {
    const int64_t count = std::min(kBlock, to - block);
    for (int64_t j = 0; j < width; j += 4) {
      const float* rows[4];
      for (int64_t r = 0; r < 4; ++r)
        rows[r] = problem.w + outputs.index[std::min(first + j + r, outputs.size() - 1)] * problem.in;
      float* column = panel + (block - from) * width + j;
      int64_t i = 0;
      for (; inputs.all && i + 4 <= count; i += 4) {
        const float* corner[4] = {rows[0] + block + i, rows[1] + block + i, rows[2] + block + i, rows[3] + block + i};
        transpose_4x4(corner, column + i * width, width);
      }
      for (; i < count; ++i)
        for (int64_t r = 0; r < 4; ++r) column[i * width + r] = rows[r][inputs.index[block + i]];
    }
  }
}

// Rows of x restricted to the kept inputs: x itself where all are kept, else a compact copy.
class Rows {
 public:
  Rows(const float* x, int64_t in, const Kept& inputs, int64_t begin, int64_t end)
      : copy_(inputs.all ? 0 : (end - begin) * inputs.size()) {
    if (inputs.all) {
      base_ = x + begin * in;
      stride_ = in;
      return;
    }
    stride_ = inputs.size();
    for (int64_t b = begin; b < end; ++b)
      for (int64_t i = 0; i < stride_; ++i) copy_[(b - begin) * stride_ + i] = x[b * in + inputs.index[i]];
    base_ = copy_.data();
  }

  const float* operator[](int64_t row) const { return base_ + row * stride_; }

 private:
  const float* base_;
  int64_t stride_;
  Buffer<float> copy_;
};

// A forward task: one panel of `width` outputs for a run of rows of one chunk.
struct ForwardTask {
  const Kept* inputs;
  const Kept* outputs;
  int64_t first_output;
  int64_t row_begin, row_end;
};

// Cut a problem into forward tasks and run them. At most `max_rows` rows share one packing of the weights.
template <class Run>
void for_each_panel(const Problem& problem, int64_t width, int64_t max_rows, Run run) {
  const auto inputs = kept_per_chunk(problem.in_keep, problem.chunks, problem.in);
  const auto outputs = kept_per_chunk(problem.out_keep, problem.chunks, problem.out);
  std::vector<ForwardTask> tasks;
  for (int64_t c = 0; c < problem.chunks; ++c) {
    const int64_t begin = c * problem.chunk_rows(), end = std::min(problem.batch, begin + problem.chunk_rows());
    for (int64_t row = begin; row < end; row += max_rows)
      for (int64_t k = 0; k < outputs[c].size(); k += width)
        tasks.push_back({&inputs[c], &outputs[c], k, row, std::min(end, row + max_rows)});
  }
  // Waking a thread costs more than a tiny problem.
  const bool tiny = double(problem.batch) * double(problem.in) * double(problem.out) < 30000.0;
  parallel_for(int64_t(tasks.size()), tiny ? 1 : problem.threads, [&](int64_t t) { run(tasks[t]); });
}

// g * sign(t), the derivative of g * |t|: 0 at t == 0, as in torch.
inline float with_sign(float g, float t) { return t > 0 ? g : t < 0 ? -g : 0.0f; }

// Write the valid columns of a tile row to their places in y.
inline void scatter_outputs(const ForwardTask& task, const float* values, int64_t width, float* y_row) {
  const int64_t count = std::min(width, task.outputs->size() - task.first_output);
  const int32_t* index = task.outputs->index.data() + task.first_output;
  if (task.outputs->all)
    std::copy(values, values + count, y_row + task.first_output);
  else
    for (int64_t j = 0; j < count; ++j) y_row[index[j]] = values[j];
}

}  // namespace sortrl::SORTRL_ISA
