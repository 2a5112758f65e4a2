// Python bindings: tensors in, nothing out; results are written to tensors of the caller. A call whose tensors do not fit
// together raises an error that names the argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "argument.h"
#include "kernels.h"

namespace sortrl {
namespace SORTRL_ISA {
extern const Kernels kernels;
}

namespace {

const Kernels& kernels = SORTRL_ISA::kernels;
using Release = nb::gil_scoped_release;

// What every kernel takes: x (batch, in), w (out, in), and masks (chunks, in) and (chunks, out) or None.
struct Layer {
  Argument x, w, in_keep, out_keep;
  Problem problem;

  Layer(nb::handle x_, nb::handle w_, nb::handle in_keep_, nb::handle out_keep_, int threads, const char* x_name = "x")
      : x(x_name, x_), w("w", w_), in_keep("in_keep", in_keep_), out_keep("out_keep", out_keep_) {
    problem.w = w.floats({kAny, kAny});
    problem.out = w.size(0);
    problem.in = w.size(1);
    for (const int64_t side : {problem.in, problem.out})
      if (side < 1 || side > std::numeric_limits<int32_t>::max())  // positions have 32 bits
        throw BadCall("w has a side of " + std::to_string(side) + "; expected 1 to 2^31 - 1.");
    problem.x = x.floats({kAny, problem.in});
    problem.batch = x.size(0);
    problem.in_keep = in_keep ? in_keep.bools({kAny, problem.in}) : nullptr;
    const int64_t in_chunks = in_keep ? in_keep.size(0) : kAny;
    problem.out_keep = out_keep ? out_keep.bools({in_chunks, problem.out}) : nullptr;
    const int64_t chunks = in_keep ? in_chunks : out_keep ? out_keep.size(0) : 1;
    if (chunks < 1) throw BadCall("the masks have no rows; expected one per chunk of the batch.");
    problem.chunks = problem.batch ? chunks : 0;
    problem.threads = threads;
  }
  Layer(nb::handle x, nb::handle w, int threads, const char* x_name = "x")
      : Layer(x, w, nb::none(), nb::none(), threads, x_name) {}

  float* like_x(const Argument& a) const { return a.floats({problem.batch, problem.in}); }
  float* like_w(const Argument& a) const { return a.floats({problem.out, problem.in}); }
  float* like_y(const Argument& a) const { return a.floats({problem.batch, problem.out}); }
};

// The gradients asked for: a tensor to add to, or None.
struct Gradients {
  Argument x, w;
  float *to_x, *to_w;

  Gradients(const Layer& layer, nb::handle x_, nb::handle w_)
      : x("grad_x", x_, true), w("grad_w", w_, true), to_x(x ? layer.like_x(x) : nullptr),
        to_w(w ? layer.like_w(w) : nullptr) {}
};

struct Mix {
  Argument tensor;
  const float* weights;
  int64_t top;

  Mix(const Layer& layer, nb::handle mix) : tensor("mix", mix), weights(tensor.floats({kAny})), top(tensor.size(0)) {
    const int64_t longest = std::min(kMaxTop, layer.problem.in);
    if (top < 1 || top > longest)
      throw BadCall("mix has " + std::to_string(top) + " weights; expected 1 to " + std::to_string(longest) + ".");
  }
};

float checked_exponent(float p) {
  if (!(p >= 2.0f) || std::isinf(p)) throw BadCall("p is " + std::to_string(p) + "; expected a finite number from 2.");
  return p;
}

bool all_finite(nb::handle tensor) {
  const Argument argument("tensor", tensor);
  const float* values = argument.floats();
  const int64_t n = argument.elements();
  const Release release;
  // A non-finite number is one whose exponent has all bits set; integer logic keeps the loop free of branches.
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= uint32_t((bits & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

void max_forward(nb::handle x, nb::handle w, nb::handle in_keep, nb::handle out_keep, int threads, nb::handle y) {
  const Layer layer(x, w, in_keep, out_keep, threads);
  const Argument result("y", y, true);
  float* to = layer.like_y(result);
  const Release release;
  kernels.max_forward(layer.problem, to);
}

void max_backward(nb::handle x, nb::handle w, nb::handle in_keep, nb::handle out_keep, int threads, nb::handle y,
                  nb::handle grad, nb::handle grad_x, nb::handle grad_w) {
  const Layer layer(x, w, in_keep, out_keep, threads);
  const Argument result("y", y), gradient("grad", grad);
  const Gradients to(layer, grad_x, grad_w);
  const float *from_y = layer.like_y(result), *from_grad = layer.like_y(gradient);
  const Release release;
  kernels.max_backward(layer.problem, from_y, from_grad, to.to_x, to.to_w);
}

void lp_forward(nb::handle x, nb::handle w, nb::handle in_keep, nb::handle out_keep, int threads, float p,
                nb::handle y) {
  const Layer layer(x, w, in_keep, out_keep, threads);
  const Argument result("y", y, true);
  float* to = layer.like_y(result);
  checked_exponent(p);
  const Release release;
  kernels.lp_forward(layer.problem, p, to);
}

void lp_backward(nb::handle x, nb::handle w, nb::handle in_keep, nb::handle out_keep, int threads, float p,
                 nb::handle y, nb::handle grad, nb::handle grad_x, nb::handle grad_w) {
  const Layer layer(x, w, in_keep, out_keep, threads);
  const Argument result("y", y), gradient("grad", grad);
  const Gradients to(layer, grad_x, grad_w);
  const float *from_y = layer.like_y(result), *from_grad = layer.like_y(gradient);
  checked_exponent(p);
  const Release release;
  kernels.lp_backward(layer.problem, p, from_y, from_grad, to.to_x, to.to_w);
}

void sort_forward(nb::handle x, nb::handle w, int threads, nb::handle mix, nb::handle y) {
  const Layer layer(x, w, threads);
  const Mix weights(layer, mix);
  const Argument result("y", y, true);
  float* to = layer.like_y(result);
  const Release release;
  kernels.sort_forward(layer.problem, weights.weights, weights.top, to);
}

void sort_backward(nb::handle x, nb::handle w, int threads, nb::handle mix, nb::handle grad, nb::handle grad_x,
                   nb::handle grad_w) {
  const Layer layer(x, w, threads);
  const Mix weights(layer, mix);
  const Argument gradient("grad", grad);
  const Gradients to(layer, grad_x, grad_w);
  const float* from_grad = layer.like_y(gradient);
  const Release release;
  kernels.sort_backward(layer.problem, weights.weights, weights.top, from_grad, to.to_x, to.to_w);
}

void max_bounds(nb::handle lo, nb::handle hi, nb::handle w, int threads, nb::handle y_lo, nb::handle y_hi) {
  const Layer layer(lo, w, threads, "lo");
  const Argument upper("hi", hi), lower_result("y_lo", y_lo, true), upper_result("y_hi", y_hi, true);
  const Box box{layer.problem, layer.like_x(upper)};
  float *to_lo = layer.like_y(lower_result), *to_hi = layer.like_y(upper_result);
  const Release release;
  kernels.max_bounds(box, to_lo, to_hi);
}

void max_reach(nb::handle lo, nb::handle hi, nb::handle w, int threads, nb::handle least, nb::handle used) {
  const Layer layer(lo, w, threads, "lo");
  const Argument upper("hi", hi), bars("least", least), result("used", used, true);
  const Box box{layer.problem, layer.like_x(upper)};
  const float* from_least = layer.like_y(bars);
  auto* to = const_cast<uint8_t*>(result.bools({layer.problem.in}));
  const Release release;
  kernels.max_reach(box, from_least, to);
}

void sort_bounds(nb::handle lo, nb::handle hi, nb::handle w, int threads, nb::handle mix, nb::handle y_lo,
                 nb::handle y_hi) {
  const Layer layer(lo, w, threads, "lo");
  const Mix weights(layer, mix);
  const Argument upper("hi", hi), lower_result("y_lo", y_lo, true), upper_result("y_hi", y_hi, true);
  const Box box{layer.problem, layer.like_x(upper)};
  float *to_lo = layer.like_y(lower_result), *to_hi = layer.like_y(upper_result);
  const Release release;
  kernels.sort_bounds(box, weights.weights, weights.top, to_lo, to_hi);
}

double limit(int op, int threads, double seconds) {
  if (op < kLimitMax || op > kLimitPower8Train) throw BadCall("op is " + std::to_string(op) + "; expected 0, 1 or 2.");
  const Release release;
  return kernels.limit(op, threads, seconds);
}

std::vector<std::string> cpu_supports() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    names.push_back("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2");
#endif
  names.push_back("baseline");
  return names;
}

}  // namespace

namespace SORTRL_ISA {  // Python knows classes by their names, and one process may load several sets

// A policy that decides about one observation at a time; see Network in kernels.h.
class PackedPolicy {
 public:
  explicit PackedPolicy(nb::bytes packed) try : network_(kernels.read_network(packed.c_str(), packed.size())) {
  } catch (const std::invalid_argument& error) {
    throw BadCall(error.what());
  }

  // (action, radius, runner-up), or None where only the ordinary way will do: for numbers of another type, to say
  // what is wrong with an observation, and while another thread is being served. The mean and scale are the normaliser's.
  nb::object decide(nb::handle observation, nb::handle mean, nb::handle scale, double clip, int threads) {
    nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> array;
    if (!nb::try_cast(observation, array) || int64_t(array.size()) != network_->observation_size()) return nb::none();
    const nb::dlpack::dtype type = array.dtype();
    const bool bytes = type == nb::dtype<uint8_t>(), single = type == nb::dtype<float>();
    if (!bytes && !single && type != nb::dtype<double>()) return nb::none();
    const Number number = bytes ? Number::kUint8 : single ? Number::kFloat32 : Number::kFloat64;
    const Argument mean_argument("mean", mean), scale_argument("scale", scale);
    const int64_t size = network_->observation_size();
    const Units units = {mean_argument.doubles(size), scale_argument.doubles(size), clip};
    Decision decision;
    const Outcome outcome = [&] {
      const Release release;
      return network_->decide(array.data(), number, units, threads, &decision);
    }();
    if (outcome != Outcome::kDecided) return nb::none();
    return nb::make_tuple(decision.action, decision.radius, decision.runner_up);
  }

 private:
  std::unique_ptr<Network> network_;
};

}  // namespace SORTRL_ISA

NB_MODULE(SORTRL_MODULE, m) {
  using namespace nb::literals;
  nb::exception<BadCall>(m, "BadCall", nb::module_::import_("sortrl.core.errors").attr("SortRLError"));
  m.attr("lanes") = kernels.lanes;
  m.attr("max_top") = kMaxTop;
  m.def("cpu_supports", cpu_supports);
  m.def("all_finite", all_finite, "tensor"_a);
  m.def("max_forward", max_forward, "x"_a, "w"_a, "in_keep"_a.none(), "out_keep"_a.none(), "threads"_a, "y"_a);
  m.def("max_backward", max_backward, "x"_a, "w"_a, "in_keep"_a.none(), "out_keep"_a.none(), "threads"_a, "y"_a,
        "grad"_a, "grad_x"_a.none(), "grad_w"_a.none());
  m.def("max_bounds", max_bounds, "lo"_a, "hi"_a, "w"_a, "threads"_a, "y_lo"_a, "y_hi"_a);
  m.def("max_reach", max_reach, "lo"_a, "hi"_a, "w"_a, "threads"_a, "least"_a, "used"_a);
  m.def("lp_forward", lp_forward, "x"_a, "w"_a, "in_keep"_a.none(), "out_keep"_a.none(), "threads"_a, "p"_a, "y"_a);
  m.def("lp_backward", lp_backward, "x"_a, "w"_a, "in_keep"_a.none(), "out_keep"_a.none(), "threads"_a, "p"_a, "y"_a,
        "grad"_a, "grad_x"_a.none(), "grad_w"_a.none());
  m.def("sort_forward", sort_forward, "x"_a, "w"_a, "threads"_a, "mix"_a, "y"_a);
  m.def("sort_backward", sort_backward, "x"_a, "w"_a, "threads"_a, "mix"_a, "grad"_a, "grad_x"_a.none(),
        "grad_w"_a.none());
  m.def("sort_bounds", sort_bounds, "lo"_a, "hi"_a, "w"_a, "threads"_a, "mix"_a, "y_lo"_a, "y_hi"_a);
  using SORTRL_ISA::PackedPolicy;
  nb::class_<PackedPolicy>(m, "PackedPolicy")
      .def(nb::init<nb::bytes>(), "packed"_a)
      .def("decide", &PackedPolicy::decide, "observation"_a, "mean"_a, "scale"_a, "clip"_a, "threads"_a);
  m.def("limit", limit, "op"_a, "threads"_a, "seconds"_a);
}

}  // namespace sortrl
