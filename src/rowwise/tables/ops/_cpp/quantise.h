// Rows in half a byte a column, which are looked up, sent and saved, but not updated. (A byte a column is the int8 of
// rowtype.h.)
//
// [Note: Four bits]
// A row begins with (step, low) as two floats, then has half a byte for each column, the even column in the low half,
// padded to four bytes: weight = code * step + low, two roundings. Its range is searched for: the end is moved inwards
// that leaves the smaller squared error, a fiftieth of the range at a time, and the best range met is taken. Two moves
// in a row that gain nothing end it, and so do twelve in all: on normal, uniform and Laplace rows this leaves 82 to 85
// % of the squared error of the plain range in about eight tries, where 64 tries of a two-hundredth leave 79 to 84 %.
#pragma once
#include <cstring>
#include <limits>

#include "rowtype.h"

namespace rowwise::ISA {
namespace {

constexpr float largest_code = 15.f;
constexpr int most_moves = 12, most_idle = 2;

// Codes of one range.
struct Codes {
  float step, inverse, low;

  explicit Codes(const Range& range) : low(range.low) {
    step = (range.high - range.low) * (1.f / largest_code);
    if (!(step >= 0x1p-126f)) step = 0.f;  // all weights are (nearly) equal
    inverse = step == 0.f ? 0.f : 1.f / step;
  }
  template <class V>
  inline __attribute__((always_inline)) auto at(V w) const {  // to the nearest
    return to_whole<V>(least(most((w - low) * inverse, V{}), V{} + largest_code) + 0.5f);
  }
  template <class V>
  inline __attribute__((always_inline)) V squared_distance(const float* p) const {  // from what is read back
    const V w = Vec<V>::load(p), away = to_float<V>(at<V>(w)) * step + low - w;
    return away * away;
  }
  inline float squared_error(const float* row, int64_t dim) const {
    if (dim > column_chunk) {
      return column_sum<0>(dim, [&](int64_t c) __attribute__((always_inline)) {
        return quad_from(c, dim, [&](auto v, int64_t k) __attribute__((always_inline)) {
          return squared_distance<decltype(v)>(row + k);
        });
      });
    }
    float squares[column_chunk + 4];  // so that the arithmetic is in the widest vectors, and only the tree in fours
    each_vector(dim, [&](auto v, int64_t c) __attribute__((always_inline)) {
      Vec<decltype(v)>::store(squares + c, squared_distance<decltype(v)>(row + c));
    });
    for (int k = 0; k < 4; ++k) squares[dim + k] = 0.f;
    return chunk_sum(0, dim, [&](int64_t c) __attribute__((always_inline)) { return Vec<Quad>::load(squares + c); });
  }
};

inline Range best_range(const float* row, int64_t dim) {
  Range range = range_of(row, dim), best = range;
  if (Codes(range).step == 0.f) return best;
  float least_error = Codes(range).squared_error(row, dim);
  const float move = (range.high - range.low) * (1.f / 50.f);
  for (int moves = 0, idle = 0; moves < most_moves && idle < most_idle; ++moves) {
    const Range up{range.low + move, range.high}, down{range.low, range.high - move};
    const float above = Codes(up).squared_error(row, dim), below = Codes(down).squared_error(row, dim);
    range = above <= below ? up : down;
    const float error = above <= below ? above : below;
    ++idle;
    if (error < least_error) best = range, least_error = error, idle = 0;
  }
  return best;
}

constexpr int64_t most_kept_columns = 256;  // a column is a byte

inline uint32_t magnitude(float w) {  // larger for a larger one, as a whole number; most of all for a NaN
  uint32_t bits;
  std::memcpy(&bits, &w, sizeof bits);
  return bits & 0x7fffffffu;
}

inline int64_t count_from(const uint32_t* magnitudes, int64_t dim, uint32_t least) {
  int32_t count = 0;
  for (int64_t c = 0; c < dim; ++c) count += int32_t(magnitudes[c] >= least);
  return count;
}

// The kept-th largest. Its bits are found from the highest on, so the time does not depend on the numbers' order, as
// that of a selection by pivots does.
inline uint32_t least_kept(const uint32_t* magnitudes, int64_t dim, int64_t kept) {
  uint32_t least = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const uint32_t tried = least | 1u << bit;
    const int64_t count = count_from(magnitudes, dim, tried);
    if (count < kept) continue;
    least = tried;
    if (count == kept) break;
  }
  return least;
}

inline void write_nibbles(const Codes& codes, const float* row, int64_t dim, uint8_t* out) {
  uint8_t wide[65];
  for (int64_t begin = 0; begin < dim; begin += 64) {
    const int64_t n = std::min<int64_t>(64, dim - begin);
    wide[n] = 0;  // beside the last column of an odd number
    each_vector(n, [&](auto v, int64_t c) __attribute__((always_inline)) {
      using V = decltype(v);
      narrow<V>(wide + c, codes.at<V>(Vec<V>::load(row + begin + c)));
    });
    for (int64_t k = 0; k < (n + 1) / 2; ++k) out[begin / 2 + k] = uint8_t(wide[2 * k] | wide[2 * k + 1] << 4);
  }
}

}  // namespace

void pack4(const float* in, int64_t dim, char* out, int64_t rows) {
  const int64_t bytes = packed4_bytes(dim);
  for (int64_t r = 0; r < rows; ++r, in += dim, out += bytes) {
    std::memset(out, 0, size_t(bytes));
    float* header = reinterpret_cast<float*>(out);
    if (!is_finite(in, dim)) {  // it has no range: its step says so to whoever reads it
      header[0] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    const Codes codes(best_range(in, dim));
    header[0] = codes.step, header[1] = codes.low;
    write_nibbles(codes, in, dim, reinterpret_cast<uint8_t*>(out) + 8);
  }
}

void unpack4(const char* in, int64_t dim, float* out, int64_t rows) { unpack({RowType::int4, dim, 0}, in, out, rows); }

void keep_largest(const float* in, int64_t dim, int64_t kept, char* out, int64_t rows) {
  uint32_t magnitudes[most_kept_columns];
  uint8_t columns[most_kept_columns + 1];  // the last one is written for a column that is not kept
  for (int64_t r = 0; r < rows; ++r, in += dim, out += 5 * kept) {
    for (int64_t c = 0; c < dim; ++c) magnitudes[c] = magnitude(in[c]);
    const uint32_t least = least_kept(magnitudes, dim, kept);
    const int64_t above = least == 0x7fffffffu ? 0 : count_from(magnitudes, dim, least + 1);
    int64_t alike = kept - above, n = 0;  // of those with the least magnitude, the first
    for (int64_t c = 0; c < dim; ++c) {
      const bool is_least = magnitudes[c] == least;
      columns[n] = uint8_t(c);
      n += magnitudes[c] > least || (is_least && alike > 0);
      alike -= is_least;
    }
    for (int64_t k = 0; k < kept; ++k) std::memcpy(out + 4 * k, in + columns[k], 4);
    std::memcpy(out + 4 * kept, columns, size_t(kept));
  }
}

}  // namespace rowwise::ISA
