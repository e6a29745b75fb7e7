// Counter-based uniform numbers: element i of a stream depends on (key, i) alone.
//
// Included by isa.cpp only. Tables are filled with it and (by key, row and column) come out the same for
// any number of threads and any way of cutting them; rowwise/ops/reference.py has the same arithmetic.
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

}  // namespace
}  // namespace rowwise::ISA
