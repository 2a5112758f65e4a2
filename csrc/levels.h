// Inputs that take few values in a batch: +-1, or the colours of a screen as ramps show them. Their |x - w| need not be worked
// out for every row. Inputs are put into groups with at most kMaxLevels combinations of values, and one look into a table,
// which holds a group's share of every output of a panel, stands for all inputs of the group, whatever the power.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "tile.h"

namespace sortrl::SORTRL_ISA {

constexpr int64_t kMaxLevels = 16;  // values of an input, and entries of a table
constexpr int64_t kTables = 8;      // used together: 16 kB, half of the first-level cache
constexpr int64_t kRowsForTables = 32;  // fewer rows do not pay for making them

// The columns of x as groups, and which entry of its group's table every row takes.
class Levels {
 public:
  struct Member {
    int32_t input, count;
    std::array<float, kMaxLevels> value;
  };
  struct Group {
    int64_t begin, end;  // members
  };

  explicit Levels(const Problem& problem) : batch_(problem.batch) {
    const int64_t in = problem.in;
    if (problem.in_keep || batch_ < kRowsForTables || in < 2 * kLanes || problem.out < kLanes) return;
    if (!promising(problem.x, in)) return;
    constexpr int64_t kColumns = 16;  // at a time
    const int64_t blocks = (in + kColumns - 1) / kColumns;
    Buffer<uint8_t> found(in * stride());
    std::vector<Member> columns(in);
    low_.reset(new Buffer<float>(in + kLanes, 0.0f));
    high_.reset(new Buffer<float>(in + kLanes, 0.0f));
    parallel_for(blocks, problem.threads, [&](int64_t block) {
      const int64_t first = block * kColumns, count = std::min(kColumns, in - first);
      Buffer<float> column(kColumns * stride());
      transpose(problem.x + first, in, count, column.data());
      for (int64_t i = 0; i < count; ++i) {
        columns[first + i].input = int32_t(first + i);
        scan(column.data() + i * stride(), found.data() + (first + i) * stride(), columns[first + i], (*low_)[first + i], (*high_)[first + i]);
      }
    });
    std::vector<int32_t> with[kMaxLevels + 1];
    rest_.all = false;
    for (int32_t i = 0; i < in; ++i) {
      if (columns[i].count <= kMaxLevels)
        with[columns[i].count].push_back(i);
      else
        rest_.index.push_back(i);
    }
    if (2 * rest_.size() > in) return;
    for (auto& list : with) std::reverse(list.begin(), list.end());  // so that the first of them is taken first
    for (int64_t largest = kMaxLevels; largest >= 1;) {
      if (with[largest].empty()) {
        --largest;
        continue;
      }
      const int64_t begin = int64_t(members_.size());
      for (int64_t room = kMaxLevels, count = largest; count >= (largest == 1 ? 1 : 2);) {
        if (count > room || with[count].empty()) {
          --count;
          continue;
        }
        members_.push_back(columns[with[count].back()]);
        with[count].pop_back();
        room /= count;
      }
      groups_.push_back({begin, int64_t(members_.size())});
    }
    entry_.reset(new Buffer<uint8_t>(runs() * kTables * stride(), uint8_t(0)));
    parallel_for(int64_t(groups_.size()), problem.threads, [&](int64_t g) {
      const int64_t n = stride();
      uint8_t* __restrict const entry = entry_->data() + g * n;
      uint8_t step = 1;
      for (int64_t m = groups_[g].begin; m < groups_[g].end; ++m) {
        const uint8_t* __restrict const level = found.data() + members_[m].input * n;
        for (int64_t b = 0; b < n; ++b) entry[b] = uint8_t(entry[b] + step * level[b]);
        step = uint8_t(step * members_[m].count);
      }
    });
  }

  // Whether most inputs are in groups; if not, there are none.
  explicit operator bool() const { return !groups_.empty(); }
  const Kept& rest() const { return rest_; }  // the inputs that are in no group
  int64_t runs() const { return (int64_t(groups_.size()) + kTables - 1) / kTables; }  // of kTables groups each
  // The entries of a run's first group, row by row; those of the next group are a stride() further.
  const uint8_t* entries(int64_t run) const { return entry_->data() + run * kTables * stride(); }
  int64_t stride() const { return (batch_ + 63) / 64 * 64; }

  // Call with_group(table of the group, its first member, one past its last) for every group of a run.
  template <class Body>
  void each_group(int64_t run, const Body& body) const {
    for (int64_t g = run * kTables; g < std::min<int64_t>(groups_.size(), (run + 1) * kTables); ++g)
      body(g % kTables, members_.data() + groups_[g].begin, members_.data() + groups_[g].end);
  }
  // An upper bound of |x - w| over the batch, which some output may attain.
  float farthest(const float* w, int64_t in) const {
    V most{};
    for (int64_t i = 0; i < in; i += kLanes) {
      const V weight = i + kLanes <= in ? load(w + i) : load_first(w + i, in - i);  // beyond the last input all are 0
      most = maximum(most, maximum(load(high_->data() + i) - weight, weight - load(low_->data() + i)));
    }
    float lanes[kLanes];
    store(lanes, most);
    return *std::max_element(lanes, lanes + kLanes);
  }

 private:
  // A look at some columns, so that an ordinary layer loses no time.
  bool promising(const float* x, int64_t in) const {
    constexpr int64_t kTried = 16;
    int64_t few = 0;
    for (int64_t tried = 0; tried < kTried; ++tried) {
      const float* column = x + tried * in / kTried;
      float value[kMaxLevels];
      int64_t count = 0;
      for (int64_t b = 0; b < std::min(batch_, 2 * kRowsForTables) && count <= kMaxLevels; ++b) {
        if (std::find(value, value + count, column[b * in]) != value + count) continue;
        if (count < kMaxLevels) value[count] = column[b * in];
        ++count;
      }
      few += count <= kMaxLevels;
    }
    return 4 * few >= kTried;
  }

  // Columns of x, one after the other, each filled up with its first value.
  void transpose(const float* x, int64_t in, int64_t count, float* to) const {
    int64_t b = 0;
    for (; b + 4 <= batch_; b += 4) {
      int64_t i = 0;
      const float* row[4] = {x + b * in, x + (b + 1) * in, x + (b + 2) * in, x + (b + 3) * in};
      for (; i + 4 <= count; i += 4) {
        const float* corner[4] = {row[0] + i, row[1] + i, row[2] + i, row[3] + i};
        transpose_4x4(corner, to + i * stride() + b, stride());
      }
      for (; i < count; ++i)
        for (int r = 0; r < 4; ++r) to[i * stride() + b + r] = row[r][i];
    }
    for (; b < batch_; ++b)
      for (int64_t i = 0; i < count; ++i) to[i * stride() + b] = x[b * in + i];
    for (int64_t i = 0; i < count; ++i) std::fill(to + i * stride() + batch_, to + (i + 1) * stride(), to[i * stride()]);
  }

  // The values of a column in order of appearance, and the number of every entry among them; the least and the greatest. A
  // column with too many values gets a count beyond kMaxLevels.
  void scan(const float* x, uint8_t* found, Member& column, float& low, float& high) const {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    int32_t count = 0;
    V least = load(x), most = least;
    for (int64_t b = 0; b < stride(); b += kLanes) {
      const V value = load(x + b);
      least = minimum(least, value);
      most = maximum(most, value);
      if (count > kMaxLevels) continue;
      VI level{};
      uint32_t left = kLanes == 32 ? ~0u : (1u << kLanes) - 1;
      for (int32_t j = 0;; ++j) {
        if (j == count) {
          if (left == 0) break;
          if (count++ == kMaxLevels) break;
          column.value[j] = x[b + __builtin_ctz(left)];
        }
        const V known = broadcast(column.value[j]);
        left &= ~lanes_equal(value, known);
        level = value == known ? VI{} + j : level;
      }
      const Bytes bytes = __builtin_convertvector(level, Bytes);
      std::memcpy(found + b, &bytes, sizeof bytes);
    }
    column.count = count;
    float lanes[kLanes];
    store(lanes, least);
    low = *std::min_element(lanes, lanes + kLanes);
    store(lanes, most);
    high = *std::max_element(lanes, lanes + kLanes);
  }

  int64_t batch_;
  std::vector<Member> members_;
  std::vector<Group> groups_;
  std::unique_ptr<Buffer<uint8_t>> entry_;      // (runs * kTables, stride): of every group and row
  std::unique_ptr<Buffer<float>> low_, high_;  // (in), of all columns
  Kept rest_;
};

// Add to acc (rows, Width) what the tables of every run give to it. `share` makes V from (value of an input, weights, first
// lane); `combine` is a sum or a maximum. `panel` (in, Width) holds the weights.
template <int64_t Width, class Share, class Combine>
void accumulate_levels(const Levels& levels, const float* panel, int64_t row_begin, int64_t row_end, float* acc, Share share,
                       Combine combine) {
  constexpr int kVectorsOf = Width / kLanes;
  const int64_t stride = levels.stride();
  Buffer<float> tables(kTables * kMaxLevels * Width, 0.0f);
  for (int64_t run = 0; run < levels.runs(); ++run) {
    if (run + 1 == levels.runs()) std::fill(tables.data(), tables.data() + tables.size(), 0.0f);  // perhaps not all are used
    levels.each_group(run, [&](int64_t g, const Levels::Member* member, const Levels::Member* end) {
      float* const table = tables.data() + g * kMaxLevels * Width;
      for (int64_t v = 0; v < kVectorsOf; ++v) store(table + v * kLanes, V{});
      int64_t size = 1;
      for (; member != end; ++member) {
        const float* w = panel + member->input * Width;
        for (int32_t j = member->count - 1; j >= 0; --j)  // the first entries last: all others are made of them
          for (int64_t v = 0; v < kVectorsOf; ++v) {
            const V of = share(broadcast(member->value[j]), load(w + v * kLanes), v);
            for (int64_t s = 0; s < size; ++s)
              store(table + (j * size + s) * Width + v * kLanes, combine(load(table + s * Width + v * kLanes), of));
          }
        size *= member->count;
      }
    });
    const uint8_t* entry = levels.entries(run) + row_begin;
    for (int64_t b = row_begin; b < row_end; ++b, ++entry) {
      float* const to = acc + (b - row_begin) * Width;
      V sum[kVectorsOf];
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsOf; ++v) sum[v] = load(to + v * kLanes);
#pragma GCC unroll 8
      for (int64_t g = 0; g < kTables; ++g) {
        const float* from = tables.data() + (g * kMaxLevels + entry[g * stride]) * Width;
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsOf; ++v) sum[v] = combine(sum[v], load(from + v * kLanes));
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsOf; ++v) store(to + v * kLanes, sum[v]);
    }
  }
}

// The other way: for every input, value j of it and output, hand out the sum of `from` (rows, Width) over the rows in which the
// input has that value: take(member, j, first lane / kLanes, sum).
template <int64_t Width, class Take>
void sum_by_level(const Levels& levels, int64_t row_begin, int64_t row_end, const float* from, Take take) {
  constexpr int kVectorsOf = Width / kLanes;
  const int64_t stride = levels.stride();
  Buffer<float> tables(kTables * kMaxLevels * Width);
  for (int64_t run = 0; run < levels.runs(); ++run) {
    std::fill(tables.data(), tables.data() + tables.size(), 0.0f);
    const uint8_t* entry = levels.entries(run) + row_begin;
    for (int64_t b = row_begin; b < row_end; ++b, ++entry) {
      V value[kVectorsOf];
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsOf; ++v) value[v] = load(from + (b - row_begin) * Width + v * kLanes);
#pragma GCC unroll 8
      for (int64_t g = 0; g < kTables; ++g) {
        float* to = tables.data() + (g * kMaxLevels + entry[g * stride]) * Width;
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsOf; ++v) store(to + v * kLanes, load(to + v * kLanes) + value[v]);
      }
    }
    levels.each_group(run, [&](int64_t g, const Levels::Member* member, const Levels::Member* end) {
      float* const table = tables.data() + g * kMaxLevels * Width;
      int64_t size = 1;
      for (const Levels::Member* m = member; m != end; ++m) size *= m->count;
      for (; member != end; ++member) {
        const int64_t count = member->count;
        size /= count;
        for (int64_t v = 0; v < kVectorsOf; ++v) {
          float* const at = table + v * kLanes;
          for (int64_t j = 0; j < count; ++j) {
            V sum{};
            for (int64_t s = 0; s < size; ++s) sum += load(at + (s * count + j) * Width);
            take(*member, j, v, sum);
          }
          for (int64_t s = 0; s < size; ++s) {  // the next member's table, in which this one no longer counts
            V sum{};
            for (int64_t j = 0; j < count; ++j) sum += load(at + (s * count + j) * Width);
            store(at + s * Width, sum);
          }
        }
      }
    });
  }
}

}  // namespace sortrl::SORTRL_ISA
