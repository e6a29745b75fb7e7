// Vectors as the compiler's own extension, so one source serves AVX-512, AVX2, SSE2 and NEON.
//
// Every kernel is compiled once per instruction set (see CMakeLists.txt) inside its own namespace;
// LANES is the width of that set. Only the width differs between the copies: every column is summed
// on its own and every cross-column sum goes through `Tree4`, so all copies give the same bits.
// Multiplication and addition are never contracted into one rounding (-ffp-contract=off).
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>  // streaming stores and a mask test; all else is written with vector types
#endif
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#if !defined(ISA)
#error "compile the kernels with -DISA=<namespace>"
#endif
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

namespace rowwise::ISA {

typedef float Wide __attribute__((vector_size(LANES * 4)));
typedef float Quad __attribute__((vector_size(16)));
typedef Wide WideAny __attribute__((aligned(4), may_alias));
typedef Quad QuadAny __attribute__((aligned(4), may_alias));
typedef uint32_t WideBits __attribute__((vector_size(LANES * 4)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));

template <class V>
struct Vec;
template <>
struct Vec<Wide> {
  static constexpr int width = LANES;
  using Bits = WideBits;
  static inline Bits count() {  // 0, 1, 2, ...
    Bits b;
    for (uint32_t k = 0; k < LANES; ++k) b[k] = k;
    return b;
  }
  static inline Wide load(const float* p) { return *reinterpret_cast<const WideAny*>(p); }
  static inline void store(float* p, Wide v) { *reinterpret_cast<WideAny*>(p) = v; }
  static inline void stream(float* p, Wide v) {  // past the caches; p is aligned to the vector
#if LANES == 16
    _mm512_stream_ps(p, __m512(v));
#elif LANES == 8
    _mm256_stream_ps(p, __m256(v));
#elif defined(__x86_64__)
    _mm_stream_ps(p, __m128(v));
#else
    store(p, v);
#endif
  }
};
// The first floats of a vector, as many as there are left of a row; the rest are zeros, and nothing behind is read.
class Tail {
 public:
#if LANES == 16
  explicit Tail(int64_t floats) : mask_(__mmask16((1u << floats) - 1)) {}
  Wide load(const float* p) const { return Wide(_mm512_maskz_loadu_ps(mask_, p)); }

 private:
  __mmask16 mask_;
#elif LANES == 8
  explicit Tail(int64_t floats)
      : mask_(_mm256_cmpgt_epi32(_mm256_set1_epi32(int(floats)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))) {}
  Wide load(const float* p) const { return Wide(_mm256_maskload_ps(p, mask_)); }

 private:
  __m256i mask_;
#else
  explicit Tail(int64_t floats) : floats_(floats) {}
  Wide load(const float* p) const {
    Wide v = {};
    for (int64_t k = 0; k < floats_; ++k) v[k] = p[k];
    return v;
  }

 private:
  int64_t floats_;
#endif
};
#if LANES != 4
template <>
struct Vec<Quad> {
  static constexpr int width = 4;
  using Bits = QuadBits;
  static inline Bits count() { return Bits{0, 1, 2, 3}; }
  static inline Quad load(const float* p) { return *reinterpret_cast<const QuadAny*>(p); }
  static inline void store(float* p, Quad v) { *reinterpret_cast<QuadAny*>(p) = v; }
  static inline void stream(float* p, Quad v) { store(p, v); }
};
#endif
template <>
struct Vec<float> {
  static constexpr int width = 1;
  using Bits = uint32_t;
  static inline Bits count() { return 0; }
  static inline float load(const float* p) { return *p; }
  static inline void store(float* p, float v) { *p = v; }
  static inline void stream(float* p, float v) { store(p, v); }
};

inline void stream_fence() {  // before another thread reads what was streamed
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// A row is worked on in strips of columns that fit in registers: up to eight vectors, then what is left
// in vectors of four, then single columns. f(Strip<V, N>, first column).
template <class V, int N>
struct Strip {
  using type = V;
  static constexpr int count = N;
};

template <class F>
inline __attribute__((always_inline)) void for_strips(int64_t dim, F f) {
  int64_t c = 0;
  for (; c + 8 * LANES <= dim; c += 8 * LANES) f(Strip<Wide, 8>{}, c);
  if (c + 4 * LANES <= dim) f(Strip<Wide, 4>{}, c), c += 4 * LANES;
  if (c + 2 * LANES <= dim) f(Strip<Wide, 2>{}, c), c += 2 * LANES;
  if (c + LANES <= dim) f(Strip<Wide, 1>{}, c), c += LANES;
  if (c + 8 <= dim) f(Strip<Quad, 2>{}, c), c += 8;
  if (c + 4 <= dim) f(Strip<Quad, 1>{}, c), c += 4;
  if (c + 2 <= dim) f(Strip<float, 2>{}, c), c += 2;
  if (c < dim) f(Strip<float, 1>{}, c);
}

// Strips of whole vectors only, the last of which may reach past the row: f(Strip, first column, floats of the strip).
// For kernels in which each strip walks the whole list of ids: this gives the fewest strips.
template <class F>
inline __attribute__((always_inline)) void for_padded_strips(int64_t dim, F f) {
  int64_t c = 0;
  for (; c + 8 * LANES <= dim; c += 8 * LANES) f(Strip<Wide, 8>{}, c, 8 * LANES);
  const int64_t left = dim - c;
  switch ((left + LANES - 1) / LANES) {
    case 0:
      break;
    case 1:
      f(Strip<Wide, 1>{}, c, left);
      break;
    case 2:
      f(Strip<Wide, 2>{}, c, left);
      break;
    case 3:
      f(Strip<Wide, 3>{}, c, left);
      break;
    case 4:
      f(Strip<Wide, 4>{}, c, left);
      break;
    case 5:
      f(Strip<Wide, 5>{}, c, left);
      break;
    case 6:
      f(Strip<Wide, 6>{}, c, left);
      break;
    case 7:
      f(Strip<Wide, 7>{}, c, left);
      break;
    default:
      f(Strip<Wide, 8>{}, c, left);
  }
}

inline bool is_one_strip(int64_t dim) {
  int64_t strips = 0;
  for_strips(dim, [&](auto, int64_t) { ++strips; });
  return strips == 1;
}

template <class F>
inline __attribute__((always_inline)) void each_vector(int64_t dim, F f) {  // f(any vector of the type, first column)
  for_strips(dim, [&](auto strip, int64_t column) __attribute__((always_inline)) {
    using V = typename decltype(strip)::type;
    for (int k = 0; k < decltype(strip)::count; ++k) f(V{}, column + k * Vec<V>::width);
  });
}

inline int64_t whole_vectors(int64_t floats) { return (floats + LANES - 1) / LANES * LANES; }

// Whether adjacent rows of `bytes` bytes, the first at the begin of a line, never touch more lines than they need.
inline bool fill_lines(int64_t bytes) { return bytes % 64 == 0 || 64 % bytes == 0; }

// The lines that `bytes` lie on. Where rows are whole lines they start on one (arenas are aligned); else they may
// end on a line more. Always inlined: a function that only prefetches looks free of effects to GCC, which
// then drops the calls to it.
template <int locality = 3>  // 3: into the first-level cache, 2: into the second
inline __attribute__((always_inline)) void prefetch(const char* p, int64_t bytes, bool whole_lines) {
  for (int64_t k = 0; k < bytes; k += 64) __builtin_prefetch(p + k, 0, locality);
  if (!whole_lines) __builtin_prefetch(p + bytes - 1, 0, locality);
}

// [Note: Column sums]
// A sum over the columns of a row is a pairwise tree whose leaves are blocks of four columns,
// (c0 + c1) + (c2 + c3); missing columns count as zero. A tile that holds some of the blocks can therefore
// hand over its partial sums, and the whole row gives the same bits.

// Two levels of the tree at once: sixteen neighbours become four sums (a 4 x 4 transpose by pair sums).
inline Quad sum_by_fours(Quad a, Quad b, Quad c, Quad d) {
  const Quad ab = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
  const Quad cd = __builtin_shufflevector(c, d, 0, 2, 4, 6) + __builtin_shufflevector(c, d, 1, 3, 5, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

constexpr int64_t column_chunk = 1024;  // a complete subtree, small enough for the stack

// Sixteen columns, or as many as there are.
template <class F>
inline __attribute__((always_inline)) Quad sum_four_blocks(int64_t c, int64_t end, F block_of) {
  if (c + 16 <= end) return sum_by_fours(block_of(c), block_of(c + 4), block_of(c + 8), block_of(c + 12));
  const auto block = [&](int64_t k) __attribute__((always_inline)) { return k < end ? block_of(k) : Quad{}; };
  return sum_by_fours(block(c), block(c + 4), block(c + 8), block(c + 12));
}

// The sum of one chunk: block_of(c) gives the four terms from column c on.
template <class F>
inline float chunk_sum(int64_t begin, int64_t end, F block_of) {
  float sums[column_chunk / 4 + 16];
  int64_t n = 0;
  for (int64_t c = begin; c < end; c += 16, n += 4) Vec<Quad>::store(sums + n, sum_four_blocks(c, end, block_of));
  while (n > 4) {
    const int64_t groups = (n + 15) / 16;
    for (int64_t k = n; k < groups * 16; ++k) sums[k] = 0.f;
    for (int64_t g = 0; g < groups; ++g) {
      const float* s = sums + g * 16;
      Vec<Quad>::store(sums + g * 4, sum_by_fours(Vec<Quad>::load(s), Vec<Quad>::load(s + 4), Vec<Quad>::load(s + 8),
                                                  Vec<Quad>::load(s + 12)));
    }
    n = groups * 4;
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Of a whole number of vectors of sixteen, known to the compiler: the tree stays in registers.
template <int Quads, class F>
inline __attribute__((always_inline)) Quad quad_tree(int64_t c, F block_of) {
  if constexpr (Quads == 1) {
    return block_of(c);
  } else if constexpr (Quads <= 4) {
    const Quad none = {0.f, 0.f, 0.f, 0.f};
    return sum_by_fours(block_of(c), block_of(c + 4), Quads > 2 ? block_of(c + 8) : none,
                        Quads > 3 ? block_of(c + 12) : none);
  } else {
    constexpr int part = Quads > 16 ? 16 : 4;  // quads in each of up to four subtrees
    constexpr int left = Quads - part;
    const Quad none = {0.f, 0.f, 0.f, 0.f};
    return sum_by_fours(
        quad_tree<part>(c, block_of), quad_tree<std::min(left, part)>(c + part * 4, block_of),
        left > part ? quad_tree<std::max(1, std::min(left - part, part))>(c + part * 8, block_of) : none,
        left > 2 * part ? quad_tree<std::max(1, std::min(left - 2 * part, part))>(c + part * 12, block_of) : none);
  }
}

template <int D, class F>
inline __attribute__((always_inline)) float column_sum(int64_t dim, F block_of) {
  if constexpr (D != 0) {  // a multiple of 16
    const Quad q = quad_tree<D / 4>(0, block_of);
    return (q[0] + q[1]) + (q[2] + q[3]);
  }
  if (dim <= column_chunk) return chunk_sum(0, dim, block_of);
  float level[48];  // a binary counter of finished subtrees
  int64_t chunks = 0;
  for (int64_t c = 0; c < dim; c += column_chunk) {
    float sum = chunk_sum(c, std::min(dim, c + column_chunk), block_of);
    int k = 0;
    for (int64_t carry = chunks++; carry & 1; carry >>= 1) sum = level[k++] + sum;
    level[k] = sum;
  }
  float total = 0.f;
  for (int k = 0; chunks; ++k, chunks >>= 1)
    if (chunks & 1) total = level[k] + total;
  return total;
}

inline bool any_nan(Wide v) {
#if LANES == 16
  return _mm512_cmp_ps_mask(__m512(v), __m512(v), _CMP_UNORD_Q) != 0;
#elif LANES == 8
  return _mm256_movemask_ps(_mm256_cmp_ps(__m256(v), __m256(v), _CMP_UNORD_Q)) != 0;
#else
  const float sum = (v[0] + v[1]) + (v[2] + v[3]);
  return sum != sum;
#endif
}

// Whether all of a row is: x * 0 is 0 unless x is Inf or NaN.
inline __attribute__((always_inline)) bool is_finite(const float* g, int64_t dim) {
  Wide wide = {};
  Quad quads = {};
  float narrow = 0.f;
  each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using V = decltype(v);
    const V zero = Vec<V>::load(g + c) * 0.f;
    if constexpr (std::is_same_v<V, Wide>)
      wide += zero;
    else if constexpr (std::is_same_v<V, float>)
      narrow += zero;
    else
      quads += zero;
  });
  return !any_nan(wide) && (quads[0] + quads[1]) + (quads[2] + quads[3]) + narrow == 0.f;
}

// Four columns from c on, zeros past the end of the row; at(any vector of the type, column).
template <class F>
inline __attribute__((always_inline)) Quad quad_from(int64_t c, int64_t dim, F at) {
  if (c + 4 <= dim) return at(Quad{}, c);
  Quad q = {0.f, 0.f, 0.f, 0.f};
  for (int64_t k = 0; c + k < dim; ++k) q[k] = at(0.f, c + k);
  return q;
}
inline __attribute__((always_inline)) Quad quad_at(const float* row, int64_t c, int64_t dim) {
  return quad_from(c, dim,
                   [&](auto v, int64_t at) __attribute__((always_inline)) { return Vec<decltype(v)>::load(row + at); });
}

}  // namespace rowwise::ISA
