// How rows are stored: reading any format as floats, writing floats back with stochastic rounding.
//
// Included by isa.cpp only, once per instruction set. The arithmetic of the kernels is in 32-bit floats throughout; a
// format is only the way in and the way out. See [Note: Row formats] in tables.h.
#pragma once
#include <cstring>
#include <limits>

#include "random.h"

namespace rowwise::ISA {
namespace {

// Integers of a vector's lanes, and back.
template <class V>
inline typename Vec<V>::Bits bits_of(V v) {
  typename Vec<V>::Bits b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}
template <class V>
inline V float_of(typename Vec<V>::Bits b) {
  V v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

// Narrow integers to the lanes of a vector, and back. Spelled out for the widest vectors, which matter and which the
// compiler does not find; generic for the others.
template <class V, class Narrow>
inline __attribute__((always_inline)) typename Vec<V>::Bits widen(const Narrow* p) {
  using Bits = typename Vec<V>::Bits;
  if constexpr (Vec<V>::width == 1) {
    return *p;
  } else {
#if LANES == 16
    if constexpr (Vec<V>::width == 16 && sizeof(Narrow) == 2)
      return Bits(_mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
    if constexpr (Vec<V>::width == 16 && sizeof(Narrow) == 1)
      return Bits(_mm512_maskz_cvtepu8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif LANES == 8
    if constexpr (Vec<V>::width == 8 && sizeof(Narrow) == 2)
      return Bits(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    if constexpr (Vec<V>::width == 8 && sizeof(Narrow) == 1)
      return Bits(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
    typedef Narrow Lanes __attribute__((vector_size(Vec<V>::width * sizeof(Narrow))));
    Lanes n;
    std::memcpy(&n, p, sizeof n);
    return __builtin_convertvector(n, Bits);
  }
}
template <class V, class Narrow>
inline __attribute__((always_inline)) void narrow(Narrow* p, typename Vec<V>::Bits b) {
  if constexpr (Vec<V>::width == 1) {
    *p = Narrow(b);
    return;
  } else {
#if LANES == 16
    if constexpr (Vec<V>::width == 16 && sizeof(Narrow) == 2)
      return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xFFFF, __m512i(b)));
    if constexpr (Vec<V>::width == 16 && sizeof(Narrow) == 1)
      return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(0xFFFF, __m512i(b)));
#elif LANES == 8
    if constexpr (Vec<V>::width == 8) {
      const __m128i half =
          _mm_packus_epi32(_mm256_castsi256_si128(__m256i(b)), _mm256_extracti128_si256(__m256i(b), 1));
      if constexpr (sizeof(Narrow) == 2) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
      return _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(half, half));
    }
#endif
    typedef Narrow Lanes __attribute__((vector_size(Vec<V>::width * sizeof(Narrow))));
    const Lanes n = __builtin_convertvector(b, Lanes);
    std::memcpy(p, &n, sizeof n);
  }
}

template <class V>
inline V to_float(typename Vec<V>::Bits b) {  // of whole numbers below 2^31
  if constexpr (Vec<V>::width == 1) {
    return V(int32_t(b));
  } else {
    typedef int32_t Signed __attribute__((vector_size(sizeof(V))));
    return __builtin_convertvector(Signed(b), V);
  }
}
template <class V>
inline typename Vec<V>::Bits to_whole(V v) {  // of floats in [0, 2^31), cut
  if constexpr (Vec<V>::width == 1) {
    return uint32_t(int32_t(v));
  } else {
    typedef int32_t Signed __attribute__((vector_size(sizeof(V))));
    return typename Vec<V>::Bits(__builtin_convertvector(v, Signed));
  }
}

template <class V>
inline V least(V a, V b) {
#if LANES == 16
  if constexpr (Vec<V>::width == 16) return V(_mm512_maskz_min_ps(0xFFFF, __m512(a), __m512(b)));
#elif LANES == 8
  if constexpr (Vec<V>::width == 8) return V(_mm256_min_ps(__m256(a), __m256(b)));
#endif
#if defined(__x86_64__)
  if constexpr (Vec<V>::width == 4) return V(_mm_min_ps(__m128(a), __m128(b)));
#endif
  return a < b ? a : b;
}
template <class V>
inline V most(V a, V b) {
#if LANES == 16
  if constexpr (Vec<V>::width == 16) return V(_mm512_maskz_max_ps(0xFFFF, __m512(a), __m512(b)));
#elif LANES == 8
  if constexpr (Vec<V>::width == 8) return V(_mm256_max_ps(__m256(a), __m256(b)));
#endif
#if defined(__x86_64__)
  if constexpr (Vec<V>::width == 4) return V(_mm_max_ps(__m128(a), __m128(b)));
#endif
  return a > b ? a : b;
}
template <class V>
inline V clamp(V v, float reach) {
  return least(most(v, V{} - reach), V{} + reach);
}

template <class V>
inline __attribute__((always_inline)) V half_to_float(const uint16_t* p) {
#if LANES == 16
  if constexpr (Vec<V>::width == 16)
    return V(_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#endif
#if defined(__F16C__)
  if constexpr (Vec<V>::width == 8) return V(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  if constexpr (Vec<V>::width == 4) return V(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
  const auto h = widen<V>(p);
  const auto sign = (h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
  const auto normal = (magnitude << 13) + (112u << 23);
  const auto small = bits_of(to_float<V>(magnitude) * 0x1p-24f);
  return float_of<V>(sign | (magnitude < 0x400u ? small : normal));
}

// The halves at or next to a float on the side of zero; of finite ones below 2^16.
template <class V>
inline __attribute__((always_inline)) void store_cut_halves(uint16_t* p, V x) {
#if LANES == 16
  if constexpr (Vec<V>::width == 16)
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xFFFF, __m512(x), 3));
#elif LANES == 8
  if constexpr (Vec<V>::width == 8)
    return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(__m256(x), 3));
#endif
#if defined(__F16C__)
  if constexpr (Vec<V>::width == 4) return _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtps_ph(__m128(x), 3));
#endif
  const auto bits = bits_of(x);
  const auto magnitude = bits & 0x7FFFFFFFu;
  const auto normal = (magnitude >> 13) - (112u << 10);
  const auto small = to_whole<V>(float_of<V>(magnitude) * 0x1p24f);
  narrow<V>(p, (bits >> 16 & 0x8000u) | (magnitude < 0x38800000u ? small : normal));
}

// The columns of one stored row as floats. `group` is that of the column, for types with scales.
template <RowType T>
struct Reader;
template <>
struct Reader<RowType::fp32> {
  static int64_t bytes(int64_t columns) { return columns * 4; }
  const float* p;
  Reader(const char* row, int64_t) : p(reinterpret_cast<const float*>(row)) {}
  template <class V>
  V at(int64_t column, int64_t) const {
    return Vec<V>::load(p + column);
  }
};
template <>
struct Reader<RowType::fp16> {
  static int64_t bytes(int64_t columns) { return columns * 2; }
  const uint16_t* p;
  Reader(const char* row, int64_t) : p(reinterpret_cast<const uint16_t*>(row)) {}
  template <class V>
  V at(int64_t column, int64_t) const {
    return half_to_float<V>(p + column);
  }
};
template <>
struct Reader<RowType::bf16> {
  static int64_t bytes(int64_t columns) { return columns * 2; }
  const uint16_t* p;
  Reader(const char* row, int64_t) : p(reinterpret_cast<const uint16_t*>(row)) {}
  template <class V>
  V at(int64_t column, int64_t) const {
    return float_of<V>(widen<V>(p + column) << 16);
  }
};
struct ScaledRow {
  const float* scales;
  const uint8_t* codes;
  ScaledRow(const char* row, int64_t header)
      : scales(reinterpret_cast<const float*>(row)), codes(reinterpret_cast<const uint8_t*>(row + header)) {}
};
template <>
struct Reader<RowType::int8> : ScaledRow {
  static int64_t bytes(int64_t columns) { return columns; }
  using ScaledRow::ScaledRow;
  template <class V>
  V at(int64_t column, int64_t group) const {
    return to_float<V>(widen<V>(codes + column)) * scales[group * 2] + scales[group * 2 + 1];
  }
};
template <>
struct Reader<RowType::int4> : ScaledRow {
  static int64_t bytes(int64_t columns) { return columns / 2; }
  using ScaledRow::ScaledRow;
  template <class V>
  V at(int64_t column, int64_t group) const {
    return to_float<V>(halves<V>(column)) * scales[group * 2] + scales[group * 2 + 1];
  }
  template <class V, class Byte = uint8_t>  // a parameter, as the compiler wants vectors of types that it knows late
  inline __attribute__((always_inline)) typename Vec<V>::Bits halves(int64_t column) const {
    if constexpr (Vec<V>::width == 1) {
      return codes[column / 2] >> (column % 2 * 4) & 15;
    } else {  // a byte to the two bytes of a pair of columns; such vectors begin at an even column
      typedef Byte Bytes __attribute__((vector_size(Vec<V>::width / 2)));
      typedef uint16_t Pairs __attribute__((vector_size(Vec<V>::width)));
      Bytes both;
      std::memcpy(&both, codes + column / 2, sizeof both);
      const Pairs pairs = __builtin_convertvector(both, Pairs);
      const Pairs apart = (pairs | pairs << 4) & 0x0F0F;
      return widen<V>(reinterpret_cast<const uint8_t*>(&apart));
    }
  }
};

// f(tag of the row type), so that each format has loops of its own.
template <RowType T>
struct Stored {
  static constexpr RowType type = T;
};
template <class F>
inline __attribute__((always_inline)) auto with_type(RowType type, F f) {
  switch (type) {
#define ROWWISE_CASE(name, bits, scaled) \
  case RowType::name:                    \
    return f(Stored<RowType::name>{});
    ROWWISE_ROW_TYPES(ROWWISE_CASE)
#undef ROWWISE_CASE
  }
  __builtin_trap();  // `check_format` lets no other type in
}

// A vector never crosses groups, which are multiples of sixteen columns.
inline int64_t group_of(const Format& format, int64_t column) { return format.group ? column / format.group : 0; }

inline __attribute__((always_inline)) void read_row(const Format& format, const char* row, float* out) {
  with_type(format.type, [&](auto stored) __attribute__((always_inline)) {
    const Reader<decltype(stored)::type> reader(row, format.header());
    each_vector(format.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      Vec<V>::store(out + c, reader.template at<V>(c, group_of(format, c)));
    });
  });
}

constexpr float max_half = 65504.f, max_bfloat = 0x1.FEp127f, max_int8 = 1e38f;

// [Note: Stochastic rounding]
// A weight between two that a format can hold becomes one of them, with the odds that keep its expectation: steps
// smaller than the format's own are not lost, but taken now and then. The bits come from RowBits. Weights past the
// format's range become its largest.
template <class V>
inline __attribute__((always_inline)) void round_to_half(uint16_t* p, V w, typename Vec<V>::Bits random) {
  const V x = clamp(w, max_half);
  const auto bits = bits_of(x);
  // Halves are 2^-10 of their power of two apart, but below 2^-14 always 2^-24: a 13-bit fraction of that away from
  // zero, then truncated. The sum is exact, or rounds where that does not change the truncated bits.
  const auto power = bits & 0x7F800000u, least_power = Vec<V>::count() * 0 + 0x38800000u;
  const auto unit = ((power > least_power ? power : least_power) - (23u << 23)) | (bits & 0x80000000u);
  store_cut_halves<V>(p, x + to_float<V>(random >> 19) * float_of<V>(unit));
}

template <class V>
inline __attribute__((always_inline)) void round_to_bfloat(uint16_t* p, V w, typename Vec<V>::Bits random) {
  narrow<V>(p, (bits_of(clamp(w, max_bfloat)) + (random >> 16)) >> 16);
}

struct Range {
  float low, high;
};

inline Range range_of(const float* w, int64_t n) {
  Wide low = Wide{} + max_int8, high = Wide{} - max_int8;
  float least_one = max_int8, most_one = -max_int8;
  each_vector(n, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using V = decltype(v);
    const V x = Vec<V>::load(w + c);
    if constexpr (std::is_same_v<V, Wide>) {
      low = least(x, low), high = most(x, high);
    } else if constexpr (std::is_same_v<V, float>) {
      least_one = least(x, least_one), most_one = most(x, most_one);
    } else {
      for (int k = 0; k < Vec<V>::width; ++k) least_one = least(x[k], least_one), most_one = most(x[k], most_one);
    }
  });
  if (n >= LANES) {
    float lows[LANES], highs[LANES];
    Vec<Wide>::store(lows, low), Vec<Wide>::store(highs, high);
    Quad low4 = Vec<Quad>::load(lows), high4 = Vec<Quad>::load(highs);
    for (int k = 4; k < LANES; k += 4)
      low4 = least(low4, Vec<Quad>::load(lows + k)), high4 = most(high4, Vec<Quad>::load(highs + k));
    for (int k = 0; k < 4; ++k) least_one = least(low4[k], least_one), most_one = most(high4[k], most_one);
  }
  // Plus zero: either of -0 and +0 could be the minimum, and their bits differ.
  return {std::max(least_one, -max_int8) + 0.f, std::min(most_one, max_int8) + 0.f};
}

// noise(V, column): added before a code is truncated, in units of 2^-22 of a code, less than one code.
constexpr int code_bits = 22;
template <class Noise>
inline __attribute__((always_inline)) void write_codes(const Format& format, const float* w, char* row, Noise noise) {
  float* scales = reinterpret_cast<float*>(row);
  uint8_t* codes = reinterpret_cast<uint8_t*>(row + format.header());
  const int64_t step = format.group ? format.group : format.dim;
  for (int64_t begin = 0; begin < format.dim; begin += step, scales += 2) {
    const int64_t n = std::min(step, format.dim - begin);
    const Range range = range_of(w + begin, n);
    const float spacing = (range.high - range.low) * (1.f / 255.f);
    const bool flat = !(spacing >= 0x1p-126f);  // all weights are (nearly) equal
    const float inverse = flat ? 0.f : 1.f / spacing;
    scales[0] = flat ? 0.f : spacing;
    scales[1] = range.low;
    each_vector(n, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      // In whole numbers: a sum of floats would be rounded, and large codes go up more often than down.
      const V code = least(most((Vec<V>::load(w + begin + c) - range.low) * inverse, V{}), V{} + 255.f);
      const auto fixed = to_whole<V>(code * float(1 << code_bits)) + noise(v, begin + c);
      narrow<V>(codes + begin + c, fixed >> code_bits);
    });
  }
}

// The weights of one row while it is updated: floats to the optimizer, whatever is stored. Types with scales `write`
// the whole row afterwards.
template <RowType T>
class Weights;
template <>
class Weights<RowType::fp32> {
 public:
  Weights(const Format&, char* row, float*, const RowBits&) : p_(reinterpret_cast<float*>(row)) {}
  template <class V>
  V at(int64_t column) const {
    return Vec<V>::load(p_ + column);
  }
  template <class V>
  void set(int64_t column, V w) const {
    Vec<V>::store(p_ + column, w);
  }

 private:
  float* p_;
};
template <>
class Weights<RowType::fp16> {
 public:
  Weights(const Format&, char* row, float*, const RowBits& random)
      : p_(reinterpret_cast<uint16_t*>(row)), random_(random) {}
  template <class V>
  V at(int64_t column) const {
    return half_to_float<V>(p_ + column);
  }
  template <class V>
  void set(int64_t column, V w) const {
    round_to_half<V>(p_ + column, w, random_.at<V>(column));
  }

 private:
  uint16_t* p_;
  RowBits random_;
};
template <>
class Weights<RowType::bf16> {
 public:
  Weights(const Format&, char* row, float*, const RowBits& random)
      : p_(reinterpret_cast<uint16_t*>(row)), random_(random) {}
  template <class V>
  V at(int64_t column) const {
    return float_of<V>(widen<V>(p_ + column) << 16);
  }
  template <class V>
  void set(int64_t column, V w) const {
    round_to_bfloat<V>(p_ + column, w, random_.at<V>(column));
  }

 private:
  uint16_t* p_;
  RowBits random_;
};
template <>
class Weights<RowType::int8> {  // a group's scale is known when all its weights are, so they wait in `floats`
 public:
  Weights(const Format& format, char* row, float* floats, const RowBits&) : floats_(floats) {
    read_row(format, row, floats);
  }
  template <class V>
  V at(int64_t column) const {
    return Vec<V>::load(floats_ + column);
  }
  template <class V>
  void set(int64_t column, V w) const {
    Vec<V>::store(floats_ + column, w);
  }
  // What waited, rounded to codes.
  static inline __attribute__((always_inline)) void write(const Format& format, const float* w, char* row,
                                                          const RowBits& random) {
    write_codes(format, w, row, [&](auto v, int64_t c) __attribute__((always_inline)) {
      return random.at<decltype(v)>(c) >> (32 - code_bits);
    });
  }

 private:
  float* floats_;
};

// Rows to the nearest codes. One that is not finite has no range: its scale says so to whoever reads it.
void pack(const Format& format, const float* in, char* out, int64_t rows) {
  const int64_t bytes = format.bytes();
  for (int64_t r = 0; r < rows; ++r, in += format.dim, out += bytes) {
    std::memset(out, 0, size_t(bytes));
    if (is_finite(in, format.dim)) {
      write_codes(format, in, out,
                  [](auto v, int64_t) { return Vec<decltype(v)>::count() * 0 + (1u << (code_bits - 1)); });
    } else {
      for (int64_t g = 0; g < format.groups(); ++g)
        reinterpret_cast<float*>(out)[g * 2] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

void unpack(const Format& format, const char* in, float* out, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) read_row(format, in + r * format.bytes(), out + r * format.dim);
}

}  // namespace
}  // namespace rowwise::ISA
