// Numbers that look random and depend on nothing but a key and a counter. Source: splitmix64, Steele et al. 2014.
#pragma once
#include <cstdint>

namespace rowwise_hashing {

inline uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Of the draws that belong to one key, the one of this number: at least 0, and less than 1.
inline double share(uint64_t key, uint64_t number) { return double(mixed(key ^ mixed(number)) >> 11) * 0x1p-53; }

}  // namespace rowwise_hashing
