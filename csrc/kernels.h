// The kernels' interface: plain pointers and sizes, no framework. Every instruction set provides one table of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

// What a policy answers to one observation.
struct Decision {
  int32_t action, runner_up;
  double radius;  // certified, in unit space
  double margin;  // between the scores of the two actions
};

// The map from raw observations to unit space: clamp((raw - mean) / scale, -clip, clip), in double precision.
struct Units {
  const double *mean, *scale;  // one per number of the observation
  double clip;                 // infinity: none
};

enum class Number { kUint8, kFloat32, kFloat64 };  // what an observation consists of

enum class Outcome { kDecided, kNotFinite, kOverflow, kBusy };

// A whole policy, its weights packed for one observation at a time (network.h). It has its working memory inside, so one
// thread at a time may use it; another is told that it is busy.
class Network {
 public:
  virtual ~Network() = default;
  virtual int64_t observation_size() const = 0;
  virtual int64_t actions() const = 0;
  virtual const Units& units() const = 0;  // those of the file
  virtual Outcome decide(const void* observation, Number type, const Units& units, int threads, Decision* decision) = 0;
};

struct Kernels {
  int lanes;
  void (*max_forward)(const Problem&, float* y);
  void (*max_backward)(const Problem&, const float* y, const float* grad, float* grad_x, float* grad_w);
  void (*max_bounds)(const Box&, float* y_lo, float* y_hi);
  void (*max_reach)(const Box&, const float* least, uint8_t* used);
  void (*lp_forward)(const Problem&, float p, float* y);
  void (*lp_backward)(const Problem&, float p, const float* y, const float* grad, float* grad_x, float* grad_w);
  void (*sort_forward)(const Problem&, const float* mix, int64_t top, float* y);
  void (*sort_backward)(const Problem&, const float* mix, int64_t top, const float* grad, float* grad_x,
                        float* grad_w);
  void (*sort_bounds)(const Box&, const float* mix, int64_t top, float* y_lo, float* y_hi);
  // Read what sortrl.nets.packed wrote; throws std::invalid_argument where it is damaged.
  std::unique_ptr<Network> (*read_network)(const void* bytes, size_t size);
  // Element operations per second of the same arithmetic held in registers: the machine's ceiling for an operator.
  double (*limit)(int op, int threads, double seconds);
};

constexpr int64_t kMaxTop = 32;  // the longest mix the sort kernels take

enum Limit { kLimitMax = 0, kLimitPower8 = 1, kLimitPower8Train = 2 };

}  // namespace sortrl
