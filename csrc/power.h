// Powers of vectors. Exponents m * 2^s with m in {1, 3} need only multiplications; any other goes through log2/exp2.
#pragma once

#include <cmath>

#include "simd.h"

namespace sortrl::SORTRL_ISA {

// log2 of positive normal numbers. ln m = 2 atanh((m - 1) / (m + 1)) converges fast on [sqrt(1/2), sqrt(2)) and keeps
// its relative accuracy near 1, where large exponents magnify errors.
inline V log2_of(V a) {
  const VI bits = (VI)a - 0x3f3504f3;  // subtract sqrt(1/2): the exponent then rounds to the nearest power of two
  const VI exponent = bits >> 23;
  const V m = (V)((VI)a - (exponent << 23));
  const V f = (m - 1.0f) / (m + 1.0f), f2 = f * f;
  const V series = f * (2.885390082f + f2 * (0.961796694f + f2 * (0.577078016f + f2 * (0.412198583f + f2 * 0.3205988f))));
  return series + __builtin_convertvector(exponent, V);
}

// 2^a for a <= 126; results below the smallest normal number are 0.
inline V exp2_of(V a) {
  const V clamped = maximum(a, broadcast(-126.0f));
  const V shifted = clamped + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  const VI whole = (VI)shifted - 0x4b400000;
  const V f = clamped - (shifted - 12582912.0f);
  const V series = 1.0f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f + f * (0.00961812911f +
                   f * (0.00133335581f + f * 0.000154035304f)))));
  const V result = (V)((VI)series + (whole << 23));
  return a > -126.0f ? result : V{};
}

inline V reciprocal(V a) { return 1.0f / a; }

// t^p by squarings, the count known at compile time or not.
template <int Base>
inline V even_power(V t, int doublings) {
  V power = Base == 3 ? t * t * t : t;
  for (int s = 0; s < doublings; ++s) power *= power;
  return power;
}

// t^(p-1), which is odd: it keeps the sign of t. (t^(n-1), t^n) -> (t^(2n-1), t^(2n)).
template <int Base>
inline V odd_power(V t, int doublings) {
  V below = Base == 3 ? t * t : t, power = Base == 3 ? t * t * t : t * t;
  int s = Base == 3 ? 0 : 1;
  for (; s < doublings; ++s) {
    below *= power;
    power *= power;
  }
  return below;
}

// Powers |s|^p and sign(s) |s|^(p-1) of |s| <= 1, for p = Base * 2^doublings; a positive Static is the number of
// doublings, known to the compiler.
template <int Base, int Static>
struct ChainPower {
  static constexpr bool dear = Static == 0;
  int doublings;
  V even(V s) const { return even_power<Base>(s, Static ? Static : doublings); }
  V odd(V s) const { return odd_power<Base>(s, Static ? Static : doublings); }
};

struct GeneralPower {
  static constexpr bool dear = true;
  float p;
  static V size(V s, float exponent) {
    const V a = absolute(s);
    return a > 1e-30f ? exp2_of(exponent * log2_of(maximum(a, broadcast(1e-30f)))) : V{};
  }
  V even(V s) const { return size(s, p); }
  V odd(V s) const {
    const V power = size(s, p - 1.0f);
    return s > 0.0f ? power : -power;
  }
};

// Any of these, chosen as it runs, where few powers are needed.
struct AnyPower {
  static constexpr bool dear = true;
  int base = 0, doublings = 0;
  float p;
  explicit AnyPower(float p) : p(p) {
    for (int s = 1; s <= 12; ++s) {
      if (p == float(1 << s)) base = 1, doublings = s;
      if (p == float(3 << s)) base = 3, doublings = s;
    }
  }
  V even(V s) const {
    return base == 1 ? even_power<1>(s, doublings) : base == 3 ? even_power<3>(s, doublings) : GeneralPower{p}.even(s);
  }
  V odd(V s) const {
    return base == 1 ? odd_power<1>(s, doublings) : base == 3 ? odd_power<3>(s, doublings) : GeneralPower{p}.odd(s);
  }
};

// Call `body` with the cheapest way to raise to p. The exponents compiled in full are those of the middle of a training
// schedule, where most terms count; beyond, it pays to look for the few that do.
template <class Body>
void with_power(float p, Body body) {
  if (p == 24.0f) return body(ChainPower<3, 3>{3});
  if (p == 32.0f) return body(ChainPower<1, 5>{5});
  if (p == 48.0f) return body(ChainPower<3, 4>{4});
  if (p == 64.0f) return body(ChainPower<1, 6>{6});
  for (int s = 1; s <= 12; ++s) {
    if (p == float(1 << s)) return body(ChainPower<1, 0>{s});
    if (p == float(3 << s)) return body(ChainPower<3, 0>{s});
  }
  body(GeneralPower{p});
}

}  // namespace sortrl::SORTRL_ISA
