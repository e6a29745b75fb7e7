// Kernels of numbers: buckets, fill and transpose.
#pragma once
#include <algorithm>
#include <cstring>

#include "bags.h"

namespace rowwise_ingest::ISA {

constexpr int64_t TOGETHER = 32;  // interleaved searches, so that their loads overlap

// The number of borders that are at most x. The 2 * half - 1 borders are padded with infinity, so all binary searches
// take the same steps without branches. NaN sorts last, as in numpy.
template <class T>
static void buckets(const T* x, int64_t count, const T* borders, int64_t half, int64_t most, int64_t* out) {
  using At = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;  // as wide as T, so that lanes match
  for (int64_t begin = 0; begin < count; begin += TOGETHER) {
    const int64_t rows = std::min(TOGETHER, count - begin);
    T key[TOGETHER] = {};
    At at[TOGETHER] = {};
    std::memcpy(key, x + begin, size_t(rows) * sizeof(T));
    for (At step = At(half); step > 0; step /= 2) {
      const T* middle = borders + step - 1;
      for (int64_t k = 0; k < TOGETHER; ++k) at[k] += step & -At(!(key[k] < middle[at[k]]));
    }
    for (int64_t k = 0; k < rows; ++k) out[begin + k] = std::min(int64_t(at[k]), most);
  }
}

// Expands bits to bytes of 0 and 1.
static inline void spread(const uint8_t* bits, int64_t from, int64_t count, uint8_t* out) {
  const uint64_t every = 0x0101010101010101;
  const int shift = int(from & 7);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const uint8_t* at = bits + ((from + i) >> 3);
    const uint64_t eight = uint8_t(shift ? at[0] >> shift | at[1] << (8 - shift) : at[0]);
    // Replicate the 8 bits to all bytes, mask bit k in byte k, and carry any set bit to the byte's top bit.
    const uint64_t spread = (((eight * every) & 0x8040201008040201) + 127 * every) >> 7 & every;
    std::memcpy(out + i, &spread, 8);
  }
  for (; i < count; ++i) out[i] = bit(bits, from + i);
}

// Gathers rows from `begin` on of each column, column by column; fills missing values and NaN; 1 if any is infinite.
static int64_t fill(const Numbers* numbers, int64_t columns, const int64_t* order, int64_t begin, int64_t rows,
                    float* out) {
  uint32_t infinite = 0;
  uint8_t valid[CHUNK];
  for (int64_t c = 0; c < columns; ++c, out += rows) {
    const Numbers& column = numbers[c];
    for (int64_t r = 0; r < rows; r += CHUNK) {
      const int64_t end = std::min(CHUNK, rows - r), from = begin + r;
      const float* x = column.x + from;
      float* y = out + r;
      if (order) {
        for (int64_t i = 0; i < end; ++i) y[i] = column.x[order[from + i]];
        x = y;
      }
      if (!column.valid)
        std::memset(valid, 1, sizeof valid);
      else if (order)
        for (int64_t i = 0; i < end; ++i) valid[i] = bit(column.valid, column.bit + order[from + i]);
      else
        spread(column.valid, column.bit + from, end, valid);
      for (int64_t i = 0; i < end; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7FFFFFFF;
        infinite |= uint32_t(bits == 0x7F800000) & valid[i];
        y[i] = (bits < 0x7F800000) & (valid[i] != 0) ? x[i] : column.fill;
      }
    }
  }
  return infinite;
}

// Transposes columns into rows.
static void turn(const float* columns, int64_t count, int64_t rows, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < count; ++c) out[r * count + c] = columns[c * rows + r];
}

}  // namespace rowwise_ingest::ISA
