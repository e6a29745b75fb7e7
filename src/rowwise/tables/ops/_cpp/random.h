// Counter-based random numbers: each is a hash of a key and its place, whoever computes it.
//
// Included by isa.cpp only. Tables come out the same for any number of threads and any way of cutting them, and so
// do rounded updates; rowwise/tables/ops/reference/random.py has the same arithmetic.
#pragma once
#include "simd.h"

namespace rowwise::ISA {
namespace {

inline uint64_t mix(uint64_t x) {  // the finalizer of SplitMix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

void uniform(float* out, int64_t n, uint64_t key, uint64_t start, float low, float span) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t bits = mix(key + (start + uint64_t(i) + 1) * 0x9E3779B97F4A7C15ull);
    out[i] = low + float(int32_t(bits >> 40)) * 0x1p-24f * span;
  }
}

// The random bits of one row in one step. `key` holds table, seed and step; 32 bits for each column, by a hash that
// needs 32-bit products only, which every instruction set has in vectors.
struct RowBits {
  uint32_t low, high;
  RowBits(uint64_t key, int64_t row, int64_t first_column) {
    const uint64_t bits = mix(key + mix(uint64_t(row)));
    low = uint32_t(bits) + uint32_t(first_column) * 0x9E3779B9u, high = uint32_t(bits >> 32);
  }
  template <class V>
  inline __attribute__((always_inline)) typename Vec<V>::Bits at(int64_t column) const {
    auto x = Vec<V>::count() * 0x9E3779B9u + (uint32_t(column) * 0x9E3779B9u + low);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x ^= high;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
  }
};

}  // namespace
}  // namespace rowwise::ISA
