// Random numbers that are functions of a key and a counter: splitmix64, Steele et al. 2014.
#pragma once
#include <cstdint>

namespace rowwise_hashing {

inline uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// The random number in [0, 1) of a key and a counter.
inline double share(uint64_t key, uint64_t number) { return double(mixed(key ^ mixed(number)) >> 11) * 0x1p-53; }

}  // namespace rowwise_hashing
