// One vector type and the handful of operations the kernels need, written with GCC/Clang vector extensions so that
// the same source serves every instruction set. Intrinsics appear only where an extension has no spelling for what
// the hardware does in one instruction.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sortrl::SORTRL_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2 and NEON
#endif

typedef float V __attribute__((vector_size(4 * kLanes)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));

inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first `count` lanes from memory, the others 0.
inline V load_first(const float* p, int64_t count) {
  V v{};
  std::memcpy(&v, p, size_t(count) * sizeof(float));
  return v;
}

// Lane l from p[l * stride]. (The masked form of the gather, because the plain one draws a false warning from GCC 12.)
inline VI load_strided(const int32_t* p, int64_t stride) {
#if defined(__AVX512F__)
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (VI)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), 0xffff,
                                         _mm512_mullo_epi32(lane, _mm512_set1_epi32(int32_t(stride))), p, 4);
#elif defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return (VI)_mm256_i32gather_epi32(p, _mm256_mullo_epi32(lane, _mm256_set1_epi32(int32_t(stride))), 4);
#else
  return VI{p[0], p[stride], p[2 * stride], p[3 * stride]};
#endif
}

inline V load_strided(const float* p, int64_t stride) { return (V)load_strided(reinterpret_cast<const int32_t*>(p), stride); }

inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }

inline V broadcast(float s) { return s - V{}; }

inline V maximum(V a, V b) { return a > b ? a : b; }

inline V minimum(V a, V b) { return a < b ? a : b; }

inline V absolute(V a) { return (V)((VI)a & 0x7fffffff); }

// max(acc, |t|) for acc >= 0. AVX-512DQ has one instruction for it, which is a third of the max layer's arithmetic.
inline V max_with_abs(V acc, V t) {
#if defined(__AVX512DQ__)
  return (V)_mm512_range_ps((__m512)acc, (__m512)t, 0b1011);
#else
  return maximum(acc, absolute(t));
#endif
}

// One bit per lane where a >= b.
inline uint32_t lanes_at_least(V a, V b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ)));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps(_mm_cmpge_ps((__m128)a, (__m128)b)));
#else
  VI m = a >= b;
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= uint32_t(m[l] & 1) << l;
  return bits;
#endif
}

// One bit per lane where a == b.
inline uint32_t lanes_equal(V a, V b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_EQ_OQ)));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps(_mm_cmpeq_ps((__m128)a, (__m128)b)));
#else
  VI m = a == b;
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= uint32_t(m[l] & 1) << l;
  return bits;
#endif
}

// Append the lanes of `values` that are set in `lanes`, and those of `codes` unless `code` is null; returns how many. May
// write, but not count, up to kLanes entries.
inline int32_t compress(V values, VI codes, uint32_t lanes, float* value, int32_t* code) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(value, _mm512_maskz_compress_ps(__mmask16(lanes), (__m512)values));
  if (code) _mm512_storeu_si512(code, _mm512_maskz_compress_epi32(__mmask16(lanes), (__m512i)codes));
  return __builtin_popcount(lanes);
#else
  float value_of[kLanes];
  int32_t code_of[kLanes];
  store(value_of, values);
  std::memcpy(code_of, &codes, sizeof code_of);
  int32_t count = 0;
  for (; lanes; lanes &= lanes - 1, ++count) {
    const int l = __builtin_ctz(lanes);
    value[count] = value_of[l];
    if (code) code[count] = code_of[l];
  }
  return count;
#endif
}

// Where a > b, in the form that select() takes.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
inline Mask exceeds(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
inline VI select(Mask mask, VI a, VI b) { return (VI)_mm512_mask_blend_epi32(mask, (__m512i)b, (__m512i)a); }
#else
typedef VI Mask;
inline Mask exceeds(V a, V b) { return a > b; }
inline VI select(Mask mask, VI a, VI b) { return mask ? a : b; }
#endif

inline bool any_at_least(V a, V b) {
#if defined(__x86_64__)
  return lanes_at_least(a, b) != 0;
#else
  VI m = a >= b;
  int32_t any = 0;
  for (int l = 0; l < kLanes; ++l) any |= m[l];
  return any != 0;
#endif
}

// to[i * stride + j] = from[j][i] for i, j in 0..3.
inline void transpose_4x4(const float* const* from, float* to, int64_t stride) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  typedef float V4 __attribute__((vector_size(16)));
  V4 row[4];
  for (int j = 0; j < 4; ++j) std::memcpy(&row[j], from[j], sizeof row[j]);
  const V4 low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
  const V4 high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
  const V4 low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
  const V4 high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  const V4 column[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                        __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                        __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * stride, &column[i], sizeof column[i]);
#else
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) to[i * stride + j] = from[j][i];
#endif
}

// Large powers underflow by design; flushing them to zero avoids the hardware's slow path for subnormals.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushSubnormals() {}  // subnormals cost nothing extra elsewhere
  ~FlushSubnormals() {}
#endif
};

}  // namespace sortrl::SORTRL_ISA
