// Shared by the planner's searches: random numbers (splitmix64, a function of their seed alone), and a clock.

#ifndef ROWWISE_PLAN_SEARCH_H
#define ROWWISE_PLAN_SEARCH_H

#include <stdint.h>
#include <time.h>

static inline uint64_t random_next(uint64_t* random) {
  uint64_t z = (*random += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

static inline int32_t random_below(uint64_t* random, int32_t count) {
  return (int32_t)(((random_next(random) >> 32) * (uint64_t)count) >> 32);
}

static inline double random_uniform(uint64_t* random) { return (double)(random_next(random) >> 11) * 0x1p-53; }

static inline double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
