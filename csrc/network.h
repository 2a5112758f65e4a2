// A whole policy for one observation at a time: units, front ends, sort layers and the certificate in one call, with the
// weights packed once and no memory allocated on the way (on one thread). The layers are those of max.h and sort.h, so the
// scores are the same to the bit; the certificate is that of sortrl/nets/float_bounds.py, term by term.
#pragma once

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "sort.h"

namespace sortrl::SORTRL_ISA {

// Multiplications and additions of the certificate are rounded one by one, as they are in Python.
#if defined(__clang__)
#define SORTRL_ROUND_EACH _Pragma("clang fp contract(off)")
#else
#define SORTRL_ROUND_EACH
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

// nets/float_bounds.py has the reasons for these numbers.
constexpr double kRadiusDown = 1.0 - 1e-12, kSmallestRadius = 1e-30, kLargestError = 1e20, kLargestNumber = 1e30;

// The rounding error of a score is at most magnitudes * per_magnitude + reach * per_reach + constant.
struct Bound {
  double lipschitz, per_reach, constant, peak;
  std::vector<double> per_magnitude;
};

// What a margin certifies, given the largest number of every stage: ErrorBound.radius_and_slack and margin_radius.
inline double certified_radius(const Bound& bound, const double* magnitudes, double margin) {
  SORTRL_ROUND_EACH
  double at_state = 0.0, largest = 0.0;
  for (size_t s = 0; s < bound.per_magnitude.size(); ++s) {
    at_state += magnitudes[s] * bound.per_magnitude[s];
    largest = std::max(largest, magnitudes[s]);
  }
  at_state += bound.constant;
  const double most = margin / (2.0 * bound.lipschitz);
  const double slack = 4.0 * at_state + (2.0 * bound.per_reach) * most;
  const double radius = (margin - slack) * (kRadiusDown / (2.0 * bound.lipschitz));
  const bool sure = radius > kSmallestRadius && slack < kLargestError && largest + bound.peak * radius < kLargestNumber;
  return sure ? radius : 0.0;
}

inline double front_magnitude(double lipschitz, double largest, double offset) {
  SORTRL_ROUND_EACH
  return lipschitz * largest + offset;
}

#if !defined(__clang__)
#pragma GCC pop_options
#endif

// Reads numbers off a file, and refuses to read beyond its end.
class Reader {
 public:
  Reader(const void* bytes, size_t size) : at_(static_cast<const char*>(bytes)), left_(size) {}

  template <class T>
  T number() {
    T value;
    copy(&value, 1);
    return value;
  }

  template <class T>
  std::vector<T> numbers(uint64_t count) {
    if (count > left_ / sizeof(T)) fail("it ends too early");
    std::vector<T> values(count);
    copy(values.data(), count);
    return values;
  }

  // A size between 1 and 2^28.
  int64_t size() {
    const uint32_t value = number<uint32_t>();
    if (value < 1 || value > (1u << 28)) fail("a size is " + std::to_string(value));
    return value;
  }

  // Before memory is spent on it: is as much still to come?
  void expect(uint64_t bytes) const {
    if (bytes > left_) fail("it ends too early");
  }

  bool at_end() const { return left_ == 0; }

  [[noreturn]] static void fail(const std::string& why) {
    throw std::invalid_argument("The packed policy is damaged: " + why + ". Export it again.");
  }

 private:
  template <class T>
  void copy(T* to, uint64_t count) {
    if (count > left_ / sizeof(T)) fail("it ends too early");
    std::memcpy(to, at_, count * sizeof(T));
    at_ += count * sizeof(T);
    left_ -= count * sizeof(T);
  }

  const char* at_;
  size_t left_;
};

// One front end (nets/front.py): numbers picked, averaged over blocks of an image, shifted, scaled or clipped.
struct FrontPart {
  enum Kind : uint32_t { kPick = 0, kAverage = 1, kShift = 2, kScale = 3, kRamp = 4 };

  uint32_t kind;
  double lipschitz, offset;
  int64_t in, out;
  std::vector<int32_t> index;   // kPick: which inputs. kAverage: the first input of every block
  std::vector<float> value;     // kShift, kScale: one for each number
  int64_t side = 0, row = 0;    // kAverage: of a block; and the length of a row of the image
  float width = 1, limit = 0;   // kRamp

  FrontPart(Reader& reader, int64_t in) : kind(reader.number<uint32_t>()), in(in) {
    lipschitz = reader.number<double>();
    offset = reader.number<double>();
    out = reader.size();
    if (kind == kPick || kind == kAverage) {
      index = reader.numbers<int32_t>(out);
      if (kind == kAverage) side = reader.size(), row = reader.size();
      const int64_t last = kind == kAverage ? (side - 1) * (row + 1) : 0;
      for (const int64_t i : index)
        if (i < 0 || i + last >= in) Reader::fail("an index is " + std::to_string(i) + " of " + std::to_string(in));
      return;
    }
    if (out != in) Reader::fail("a front end changes the number of inputs");
    if (kind == kShift || kind == kScale)
      value = reader.numbers<float>(out);
    else if (kind == kRamp)
      width = reader.number<float>(), limit = reader.number<float>();
    else
      Reader::fail("it has a front end of kind " + std::to_string(kind));
  }

  void operator()(const float* x, float* y) const {
    switch (kind) {
      case kPick:
        for (int64_t i = 0; i < out; ++i) y[i] = x[index[i]];
        return;
      case kAverage:
        for (int64_t i = 0; i < out; ++i) {
          float sum = 0.0f;
          for (int64_t r = 0; r < side; ++r)
            for (int64_t c = 0; c < side; ++c) sum += x[index[i] + r * row + c];
          y[i] = sum / float(side * side);
        }
        return;
      case kShift:
        for (int64_t i = 0; i < out; ++i) y[i] = x[i] - value[i];
        return;
      case kScale:
        for (int64_t i = 0; i < out; ++i) y[i] = x[i] * value[i];
        return;
      default:
        for (int64_t i = 0; i < out; ++i) {
          const float slope = x[i] / width;
          y[i] = slope < -limit ? -limit : slope > limit ? limit : slope;
        }
    }
  }
};

// A sort layer with what is subtracted from its outputs (of the last layer: added). Its weights are packed into panels of
// `width` outputs. Sorting is by a queue: lists of single outputs would need the weights row by row, and a row that no other
// observation shares comes too slowly from memory.
struct PackedLayer {
  int64_t in, out, top, width;
  std::vector<float> mix;
  Buffer<float> panels;
  std::vector<float> shift;

  PackedLayer(Reader& reader, int64_t in)
      : in(in), out(reader.size()), top(reader.size()), width(top == 1 ? kWidth : kLanes), mix(reader.numbers<float>(top)),
        panels((reader.expect(uint64_t(out) * uint64_t(in) * sizeof(float)), groups() * width * in)) {
    if (top > std::min(kMaxTop, in)) Reader::fail("a layer mixes " + std::to_string(top) + " of its distances");
    const std::vector<float> weights = reader.numbers<float>(uint64_t(out) * uint64_t(in));
    shift = reader.numbers<float>(out);
    Problem problem{};
    problem.w = weights.data(), problem.in = in, problem.out = out;
    const std::vector<Kept> inputs = kept_per_chunk(nullptr, 1, in), outputs = kept_per_chunk(nullptr, 1, out);
    for (int64_t g = 0; g < groups(); ++g)
      pack_panel(problem, inputs[0], outputs[0], g * width, width, 0, in, panels.data() + g * width * in);
  }

  int64_t groups() const { return (out + width - 1) / width; }
};

// acc[j] = max_i |x[i] - panel[i][j]|. Even and odd inputs apart: a maximum must wait for the one before it.
inline void max_of_one(const float* x, const float* panel, int64_t inputs, float* acc) {
  V a[2][kVectors] = {};
  int64_t i = 0;
  for (; i + 2 <= inputs; i += 2)
#pragma GCC unroll 2
    for (int64_t odd = 0; odd < 2; ++odd)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        a[odd][v] = max_with_abs(a[odd][v], broadcast(x[i + odd]) - load(panel + (i + odd) * kWidth + v * kLanes));
  for (int v = 0; v < kVectors; ++v) {
    if (i < inputs) a[0][v] = max_with_abs(a[0][v], broadcast(x[i]) - load(panel + i * kWidth + v * kLanes));
    store(acc + v * kLanes, maximum(a[0][v], a[1][v]));
  }
}

inline float largest_of(const float* x, int64_t n) {
  V most{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = max_with_abs(most, load(x + i));
  most = max_with_abs(most, load_first(x + i, n - i));
  float lanes[kLanes];
  store(lanes, most);
  return *std::max_element(lanes, lanes + kLanes);
}

// The CRC-32 of zlib.
inline uint32_t crc32(const uint8_t* bytes, size_t size) {
  uint32_t table[256], sum = ~0u;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit) table[byte] = table[byte] >> 1 ^ (table[byte] & 1 ? 0xedb88320u : 0u);
  }
  for (size_t i = 0; i < size; ++i) sum = table[(sum ^ bytes[i]) & 255] ^ sum >> 8;
  return ~sum;
}

class PackedNetwork final : public Network {
 public:
  PackedNetwork(const void* bytes, size_t size) {
    static constexpr char kMagic[8] = {'s', 'o', 'r', 't', 'r', 'l', '\0', '\1'};
    uint32_t sum;
    if (size < sizeof kMagic + sizeof sum || std::memcmp(bytes, kMagic, sizeof kMagic) != 0)
      Reader::fail("it does not begin as one of this version");
    const size_t body = size - sizeof sum;
    std::memcpy(&sum, static_cast<const char*>(bytes) + body, sizeof sum);
    if (sum != crc32(static_cast<const uint8_t*>(bytes), body)) Reader::fail("its checksum is wrong");
    Reader reader(static_cast<const char*>(bytes) + sizeof kMagic, body - sizeof kMagic);
    inputs_ = reader.size();
    const uint32_t parts = reader.number<uint32_t>();
    const int64_t layers = reader.size();
    mean_ = reader.numbers<double>(inputs_);
    scale_ = reader.numbers<double>(inputs_);
    units_ = {mean_.data(), scale_.data(), reader.number<double>()};
    int64_t width = inputs_, most = inputs_;
    for (uint32_t f = 0; f < parts; ++f) {
      front_.emplace_back(reader, width);
      most = std::max(most, width = front_.back().out);
    }
    for (int64_t l = 0; l < layers; ++l) {
      layers_.push_back(std::make_unique<PackedLayer>(reader, width));
      most = std::max(most, width = layers_.back()->out);
    }
    if (width < 2) Reader::fail("it has a single action");
    bound_ = {reader.number<double>(), reader.number<double>(), reader.number<double>(), reader.number<double>(),
              reader.numbers<double>(parts + 2 * layers)};
    if (!reader.at_end()) Reader::fail("it is too long");
    magnitudes_.resize(bound_.per_magnitude.size());
    for (auto& buffer : values_) buffer = std::make_unique<Buffer<float>>(most);
    make_room(1);
  }

  int64_t observation_size() const override { return inputs_; }
  int64_t actions() const override { return layers_.back()->out; }
  const Units& units() const override { return units_; }

  Outcome decide(const void* observation, Number type, const Units& units, int threads, Decision* decision) override {
    if (busy_.exchange(true, std::memory_order_acquire)) return Outcome::kBusy;
    const Leave leave{busy_};
    make_room(threads);
    float *x = values_[0]->data(), *y = values_[1]->data();
    const bool finite = type == Number::kUint8     ? to_units(static_cast<const uint8_t*>(observation), units, x)
                        : type == Number::kFloat32 ? to_units(static_cast<const float*>(observation), units, x)
                                                   : to_units(static_cast<const double*>(observation), units, x);
    if (!finite) return Outcome::kNotFinite;
    double* magnitude = magnitudes_.data();
    for (const FrontPart& part : front_) {
      *magnitude++ = front_magnitude(part.lipschitz, largest_of(x, part.in), part.offset);
      part(x, y);
      std::swap(x, y);
    }
    for (size_t l = 0; l < layers_.size(); ++l) {
      const PackedLayer& layer = *layers_[l];
      run(l, x, y, threads);
      *magnitude++ = largest_of(y, layer.out);
      if (l + 1 < layers_.size())
        for (int64_t k = 0; k < layer.out; ++k) y[k] -= layer.shift[k];
      else
        for (int64_t k = 0; k < layer.out; ++k) y[k] = -(y[k] + layer.shift[k]);
      *magnitude++ = largest_of(y, layer.out);
      std::swap(x, y);
    }
    int32_t best = 0, next = 1;
    if (x[1] > x[0]) std::swap(best, next);
    for (int32_t k = 2; k < actions(); ++k) {  // of equal scores the first comes first
      if (x[k] > x[best])
        next = best, best = k;
      else if (x[k] > x[next])
        next = k;
    }
    const double margin = double(x[best]) - double(x[next]);
    if (!std::isfinite(margin)) return Outcome::kOverflow;
    *decision = {best, next, certified_radius(bound_, magnitudes_.data(), margin), margin};
    return Outcome::kDecided;
  }

 private:
  struct Leave {
    std::atomic<bool>& busy;
    ~Leave() { busy.store(false, std::memory_order_release); }
  };

  template <class T>
  bool to_units(const T* raw, const Units& units, float* unit) const {
    bool bad = false;
    for (int64_t i = 0; i < inputs_; ++i) {
      const double exact = (double(raw[i]) - units.mean[i]) / units.scale[i];
      const double clipped = exact < -units.clip ? -units.clip : exact > units.clip ? units.clip : exact;
      unit[i] = float(clipped);
      bad |= !(std::fabs(exact) <= std::numeric_limits<double>::max()) | !(std::fabs(unit[i]) <= std::numeric_limits<float>::max());
    }
    return !bad;
  }

  // A thread's memory for the search of every sort layer.
  void make_room(int threads) {
    while (int(searches_.size()) < std::max(threads, 1)) {
      auto& own = searches_.emplace_back();
      for (const auto& layer : layers_)
        own.push_back(layer->top > 1 ? std::make_unique<Search>(layer->in, layer->top, false, false) : nullptr);
    }
  }

  void run(size_t index, const float* x, float* y, int threads) {
    constexpr int64_t kWorthwhile = 1 << 18;  // weights for which it pays to wake a thread
    const PackedLayer& layer = *layers_[index];
    const int64_t groups = layer.groups();
    if (threads <= 1 || layer.in * layer.out < kWorthwhile) {
      for (int64_t g = 0; g < groups; ++g) run_group(layer, searches_[0][index].get(), g, x, y);
      return;
    }
    std::atomic<int64_t> next{0};
    parallel_for(threads, threads, [&](int64_t thread) {
      for (int64_t g; (g = next.fetch_add(1)) < groups;) run_group(layer, searches_[thread][index].get(), g, x, y);
    });
  }

  static void run_group(const PackedLayer& layer, Search* search, int64_t group, const float* x, float* y) {
    const int64_t first = group * layer.width, count = std::min(layer.width, layer.out - first);
    const float* panel = layer.panels.data() + first * layer.in;
    if (layer.top == 1) {
      float acc[kWidth];
      max_of_one(x, panel, layer.in, acc);
      std::copy(acc, acc + count, y + first);
      return;
    }
    search->panel = panel;
    with_static_top(layer.top, [&](auto k) {
      V largest[k()];
      VI codes[k()];
      top_k_by_queue<k(), false>(PointDistance(), {x, x, nullptr, count}, *search, largest, codes);
      write_mixed(largest, layer.mix.data(), layer.top, y + first, count);
    });
  }

  int64_t inputs_;
  std::vector<double> mean_, scale_;
  Units units_;
  std::vector<FrontPart> front_;
  std::vector<std::unique_ptr<PackedLayer>> layers_;
  Bound bound_;
  std::vector<double> magnitudes_;
  std::unique_ptr<Buffer<float>> values_[2];
  std::vector<std::vector<std::unique_ptr<Search>>> searches_;  // per thread and layer
  std::atomic<bool> busy_{false};
};

inline std::unique_ptr<Network> read_network(const void* bytes, size_t size) {
  return std::make_unique<PackedNetwork>(bytes, size);
}

}  // namespace sortrl::SORTRL_ISA
