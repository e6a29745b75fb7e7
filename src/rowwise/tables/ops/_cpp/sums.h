// Products added without being rounded first, and blocks of rows whose sums stay in registers.
//
// Included by kernels only, once per instruction set.
//
// [Note: Contracted sums]
// In the interaction and in layers, and nowhere else, a product is added without being rounded first where the
// processor can do that: the time goes into arithmetic, of which that is half. So these results differ between
// instruction sets, and from the reference, by float rounding. On one set they are the same bits for any number of
// threads: a sample is summed in one order, by one thread.
#pragma once
#include <type_traits>

#include "simd.h"

namespace rowwise::ISA {

#if LANES == 16
typedef float Half __attribute__((vector_size(32)));
typedef Half HalfAny __attribute__((aligned(4), may_alias));
template <>
struct Vec<Half> {
  static constexpr int width = 8;
  static inline Half load(const float* p) { return *reinterpret_cast<const HalfAny*>(p); }
  static inline void store(float* p, Half v) { *reinterpret_cast<HalfAny*>(p) = v; }
};
#else
typedef Wide Half;  // narrower sets lose more to short loops than they save above the diagonal
#endif

namespace {

#if LANES == 16
inline Half fused(Half a, Half b, Half c) { return Half(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
#endif
inline Wide fused(Wide a, Wide b, Wide c) {  // a * b + c
#if LANES == 16
  return Wide(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif LANES == 8
  return Wide(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
  return a * b + c;
#endif
}
#if LANES != 4
inline Quad fused(Quad a, Quad b, Quad c) { return Quad(_mm_fmadd_ps(__m128(a), __m128(b), __m128(c))); }
#endif
inline float fused(float a, float b, float c) {
#if LANES != 4
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// f(first, count) for rows [begin, end) in blocks of nearly the same size, at most `most`.
template <class F>
inline void for_blocks(int64_t begin, int64_t end, int64_t most, F f) {
  for (int64_t left = (end - begin + most - 1) / most; left > 0; --left) {
    const int64_t count = (end - begin + left - 1) / left;
    f(begin, count);
    begin += count;
  }
}

// f(count) as a constant, so that sums are in registers.
template <int most, class F>
inline void with_constant(int64_t count, F f) {
  if constexpr (most > 1)
    if (count < most) return with_constant<most - 1>(count, f);
  f(std::integral_constant<int, most>{});
}

}  // namespace
}  // namespace rowwise::ISA
