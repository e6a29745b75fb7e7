// Sorting 64-bit words by some of their bits: for the update and for distinct ids, which both sort (key, place) words.
//
// Least significant digit first, so every pass is stable and the time does not depend on the keys. Meant for
// runs of words that fit in cache; the callers see to that.
#pragma once
#include <cstdint>
#include <utility>

namespace rowwise {

inline int bits_of(uint64_t largest) { return largest ? 64 - __builtin_clzll(largest) : 0; }  // that hold 0 .. largest

inline int digit_width(int64_t n) { return n >= 1024 ? 11 : 8; }

// Sorts by bits low .. high - 1. The bits from high on must be equal in all words: the insertion sort of short runs
// compares them too. Needs n < 2^32. Returns the sorted array, which is `words` or `other`.
inline uint64_t* radix_sort(uint64_t* words, uint64_t* other, int64_t n, int low, int high) {
  if (low == high) return words;
  if (n <= 48) {
    for (int64_t i = 1; i < n; ++i) {
      const uint64_t e = words[i];
      int64_t j = i;
      for (; j > 0 && words[j - 1] >> low > e >> low; --j) words[j] = words[j - 1];
      words[j] = e;
    }
    return words;
  }
  const int bits = high - low, widest = digit_width(n);
  const int passes = (bits + widest - 1) / widest;
  for (int p = 0; p < passes; ++p) {
    const int from = low + bits * p / passes, digit = low + bits * (p + 1) / passes - from;
    const uint64_t mask = (uint64_t(1) << digit) - 1;
    uint32_t starts[2049] = {};
    for (int64_t i = 0; i < n; ++i) ++starts[(words[i] >> from & mask) + 1];
    for (uint64_t d = 0; d < mask; ++d) starts[d + 1] += starts[d];
    for (int64_t i = 0; i < n; ++i) other[starts[words[i] >> from & mask]++] = words[i];
    std::swap(words, other);
  }
  return words;
}

}  // namespace rowwise
