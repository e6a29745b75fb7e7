// How rows are stored: reading any format as floats, writing floats back with stochastic rounding.
//
// Included by isa.cpp only, once per instruction set. The arithmetic of the kernels is in 32-bit floats throughout; a
// format is only the way in and the way out. See [Note: Row formats] in tables.h.
#pragma once
#include <cstring>

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

// Lane by lane; the compiler makes vector instructions of these loops where the set has them.
template <class V, class Stored>
inline __attribute__((always_inline)) typename Vec<V>::Bits widen(const Stored* p) {
  typename Vec<V>::Bits b;
  if constexpr (Vec<V>::width == 1) {
    b = *p;
  } else {
    typedef Stored Narrow __attribute__((vector_size(Vec<V>::width * sizeof(Stored))));
    Narrow n;
    std::memcpy(&n, p, sizeof n);
    b = __builtin_convertvector(n, typename Vec<V>::Bits);
  }
  return b;
}
template <class V, class Stored>
inline __attribute__((always_inline)) void narrow(Stored* p, typename Vec<V>::Bits b) {
  if constexpr (Vec<V>::width == 1) {
    *p = Stored(b);
  } else {
    typedef Stored Narrow __attribute__((vector_size(Vec<V>::width * sizeof(Stored))));
    const Narrow n = __builtin_convertvector(b, Narrow);
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
  return a < b ? a : b;
}
template <class V>
inline V most(V a, V b) {
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

// The columns of one stored row as floats. `group` is that of the column; all but int8 ignore it.
template <RowType T>
struct Reader;
template <>
struct Reader<RowType::fp32> {
  static constexpr int size = 4;
  const float* p;
  Reader(const char* row, int64_t) : p(reinterpret_cast<const float*>(row)) {}
  template <class V>
  V at(int64_t column, int64_t) const {
    return Vec<V>::load(p + column);
  }
};
template <>
struct Reader<RowType::fp16> {
  static constexpr int size = 2;
  const uint16_t* p;
  Reader(const char* row, int64_t) : p(reinterpret_cast<const uint16_t*>(row)) {}
  template <class V>
  V at(int64_t column, int64_t) const {
    return half_to_float<V>(p + column);
  }
};
template <>
struct Reader<RowType::bf16> {
  static constexpr int size = 2;
  const uint16_t* p;
  Reader(const char* row, int64_t) : p(reinterpret_cast<const uint16_t*>(row)) {}
  template <class V>
  V at(int64_t column, int64_t) const {
    return float_of<V>(widen<V>(p + column) << 16);
  }
};
template <>
struct Reader<RowType::int8> {
  static constexpr int size = 1;
  const float* scales;
  const uint8_t* codes;
  Reader(const char* row, int64_t header)
      : scales(reinterpret_cast<const float*>(row)), codes(reinterpret_cast<const uint8_t*>(row + header)) {}
  template <class V>
  V at(int64_t column, int64_t group) const {
    return to_float<V>(widen<V>(codes + column)) * scales[group * 2] + scales[group * 2 + 1];
  }
};

// f(tag of the row type), so that each format has loops of its own.
template <RowType T>
struct Stored {
  static constexpr RowType type = T;
};
template <class F>
inline auto with_type(RowType type, F f) {
  switch (type) {
    case RowType::fp16:
      return f(Stored<RowType::fp16>{});
    case RowType::bf16:
      return f(Stored<RowType::bf16>{});
    case RowType::int8:
      return f(Stored<RowType::int8>{});
    case RowType::fp32:
      break;
  }
  return f(Stored<RowType::fp32>{});
}

// A vector never crosses groups, which are multiples of sixteen columns.
inline int64_t group_of(const Format& format, int64_t column) { return format.group ? column / format.group : 0; }

void read_row(const Format& format, const char* row, float* out) {
  with_type(format.type, [&](auto stored) {
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
void write_halves(const Format& format, const float* w, uint16_t* row, const RowBits& random) {
  each_vector(format.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using V = decltype(v);
    const auto bits = bits_of(clamp(Vec<V>::load(w + c), max_half));
    const auto noise = random.at<V>(c) >> 19;  // as many bits as are cut
    const auto magnitude = bits & 0x7FFFFFFFu;
    const auto normal = ((magnitude + noise) >> 13) - (112u << 10);
    // Below 2^-14 halves are multiples of 2^-24, however small: more bits are cut than in the exponent's own step.
    const auto small = to_whole<V>((float_of<V>(magnitude) + to_float<V>(noise) * 0x1p-37f) * 0x1p24f);
    narrow<V>(row + c, (bits >> 16 & 0x8000u) | (magnitude < 0x38800000u ? small : normal));
  });
}

void write_bfloats(const Format& format, const float* w, uint16_t* row, const RowBits& random) {
  each_vector(format.dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
    using V = decltype(v);
    const auto bits = bits_of(clamp(Vec<V>::load(w + c), max_bfloat));
    narrow<V>(row + c, (bits + (random.at<V>(c) >> 16)) >> 16);
  });
}

struct Range {
  float low, high;
};

Range range_of(const float* w, int64_t n) {
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
  if (n >= LANES)
    for (int k = 0; k < LANES; ++k) least_one = least(low[k], least_one), most_one = most(high[k], most_one);
  // Plus zero: of -0 and +0 either could be the least, and they are different bits.
  return {std::max(least_one, -max_int8) + 0.f, std::min(most_one, max_int8) + 0.f};
}

// noise(V, column): what is added before a code is cut, in [0, 1).
template <class Noise>
inline __attribute__((always_inline)) void write_codes(const Format& format, const float* w, char* row, Noise noise) {
  float* scales = reinterpret_cast<float*>(row);
  uint8_t* codes = reinterpret_cast<uint8_t*>(row + format.header());
  const int64_t step = format.group ? format.group : format.dim;
  for (int64_t begin = 0; begin < format.dim; begin += step, scales += 2) {
    const int64_t n = std::min(step, format.dim - begin);
    const Range range = range_of(w + begin, n);
    const float spacing = (range.high - range.low) * (1.f / 255.f);
    const bool flat = !(spacing >= 0x1p-126f);  // all weights are (nearly) one
    const float inverse = flat ? 0.f : 1.f / spacing;
    scales[0] = flat ? 0.f : spacing;
    scales[1] = range.low;
    each_vector(n, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      const V x = clamp(Vec<V>::load(w + begin + c), max_int8);
      const V code = (x - range.low) * inverse + noise(v, begin + c);
      narrow<V>(codes + begin + c, to_whole<V>(least(code, V{} + 255.f)));
    });
  }
}

void write_row(const Format& format, const float* w, char* row, const RowBits& random) {
  switch (format.type) {
    case RowType::fp32:
      std::memcpy(row, w, size_t(format.dim) * 4);
      return;
    case RowType::fp16:
      return write_halves(format, w, reinterpret_cast<uint16_t*>(row), random);
    case RowType::bf16:
      return write_bfloats(format, w, reinterpret_cast<uint16_t*>(row), random);
    case RowType::int8:
      return write_codes(format, w, row, [&](auto v, int64_t c) __attribute__((always_inline)) {
        using V = decltype(v);
        return to_float<V>(random.at<V>(c) >> 8) * 0x1p-24f;
      });
  }
}

// Rows to the nearest codes. One that is not finite has no range: its scale says so to whoever reads it.
void pack(const Format& format, const float* in, char* out, int64_t rows) {
  const int64_t bytes = format.bytes();
  for (int64_t r = 0; r < rows; ++r, in += format.dim, out += bytes) {
    std::memset(out, 0, size_t(bytes));
    if (is_finite(in, format.dim)) {
      write_codes(format, in, out, [](auto v, int64_t) { return decltype(v){} + 0.5f; });
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
