// Distances of blocks of points from centroids. Vectors are as long here on every processor; the compiler cuts them up.
#pragma once
#include "kernels.h"

namespace rowwise_hashing::ISA {

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
#if defined(__AVX512F__)
constexpr int64_t TOGETHER = 4;  // vectors of points that are compared to a centroid while registers hold it
#elif defined(__AVX2__)
constexpr int64_t TOGETHER = 2;
#else
constexpr int64_t TOGETHER = 1;
#endif

// Squares of distances. DIMS = 0: any number of them.
template <int64_t DIMS>
static inline void squares(const F* x, int64_t dims, const float* centroid, F* out) {
  for (int64_t v = 0; v < TOGETHER; ++v) out[v] = F{};
  const int64_t last = DIMS ? DIMS : dims;
#pragma GCC unroll 8
  for (int64_t d = 0; d < last; ++d)
#pragma GCC unroll 4
    for (int64_t v = 0; v < TOGETHER; ++v) {
      const F away = x[d * VECTORS + v] - centroid[d];
      out[v] += away * away;
    }
}

static inline double sum(const F& x) {
  double total = 0;
  for (int64_t i = 0; i < LANES; ++i) total += double(x[i]);
  return total;
}

template <int64_t DIMS>
static void nearest_of(const float* points, int64_t blocks, int64_t dims, const float* centroids, int64_t count,
                       float* best_out, int32_t* at_out) {
  for (int64_t v = 0; v < blocks * VECTORS; v += TOGETHER) {
    const F* x = reinterpret_cast<const F*>(points) + v / VECTORS * VECTORS * dims + v % VECTORS;
    F best[TOGETHER], far[TOGETHER];
    I at[TOGETHER];
    for (int64_t u = 0; u < TOGETHER; ++u) best[u] = F{} + __builtin_inff(), at[u] = I{};
    for (int64_t k = 0; k < count; ++k) {
      squares<DIMS>(x, dims, centroids + k * dims, far);
      const I number = I{} + int32_t(k);
      for (int64_t u = 0; u < TOGETHER; ++u) {
        const I nearer = far[u] < best[u];
        at[u] = nearer ? number : at[u];
        best[u] = nearer ? far[u] : best[u];
      }
    }
    for (int64_t u = 0; u < TOGETHER; ++u) {
      reinterpret_cast<F*>(best_out)[v + u] = best[u];
      reinterpret_cast<I*>(at_out)[v + u] = at[u];
    }
  }
}

template <int64_t DIMS>
static void join_to(const float* points, int64_t blocks, int64_t dims, const float* centroid, int32_t number,
                    const float* weights, float* best_io, int32_t* at_io, double* sums) {
  const F* w = reinterpret_cast<const F*>(weights);
  F* best = reinterpret_cast<F*>(best_io);
  I* at = reinterpret_cast<I*>(at_io);
  const I mine = I{} + number;
  for (int64_t b = 0; b < blocks; ++b) {
    const F* x = reinterpret_cast<const F*>(points) + b * VECTORS * dims;
    F total{}, far[TOGETHER];
    for (int64_t v = 0; v < VECTORS; v += TOGETHER) {
      squares<DIMS>(x + v, dims, centroid, far);
      for (int64_t u = 0; u < TOGETHER; ++u) {
        const int64_t i = b * VECTORS + v + u;
        const I nearer = far[u] < best[i];
        at[i] = nearer ? mine : at[i];
        best[i] = nearer ? far[u] : best[i];
        total += w[i] * best[i];
      }
    }
    sums[b] = sum(total);
  }
}

template <int64_t DIMS>
static void weigh_all(const float* points, int64_t blocks, int64_t dims, const float* centroids, int64_t count,
                      const float* weights, const float* best_in, double* totals) {
  constexpr int64_t RUN = 32;  // blocks whose sums are single precision
  const F* w = reinterpret_cast<const F*>(weights);
  const F* best = reinterpret_cast<const F*>(best_in);
  for (int64_t k = 0; k < count; ++k) totals[k] = 0;
  for (int64_t begin = 0; begin < blocks; begin += RUN) {
    const int64_t end = begin + RUN < blocks ? begin + RUN : blocks;
    for (int64_t k = 0; k < count; ++k) {
      F total{}, far[TOGETHER];
      for (int64_t b = begin; b < end; ++b)
        for (int64_t v = 0; v < VECTORS; v += TOGETHER) {
          squares<DIMS>(reinterpret_cast<const F*>(points) + b * VECTORS * dims + v, dims, centroids + k * dims, far);
          for (int64_t u = 0; u < TOGETHER; ++u) {
            const int64_t i = b * VECTORS + v + u;
            total += w[i] * (far[u] < best[i] ? far[u] : best[i]);
          }
        }
      totals[k] += sum(total);
    }
  }
}

#define BY_DIMS(call, ...)         \
  switch (dims) {                  \
    case 1:                        \
      return call<1>(__VA_ARGS__); \
    case 2:                        \
      return call<2>(__VA_ARGS__); \
    case 3:                        \
      return call<3>(__VA_ARGS__); \
    case 4:                        \
      return call<4>(__VA_ARGS__); \
    case 8:                        \
      return call<8>(__VA_ARGS__); \
    default:                       \
      return call<0>(__VA_ARGS__); \
  }

static void nearest(const float* x, int64_t blocks, int64_t dims, const float* centroids, int64_t count, float* best,
                    int32_t* at) {
  BY_DIMS(nearest_of, x, blocks, dims, centroids, count, best, at)
}
static void join(const float* x, int64_t blocks, int64_t dims, const float* centroid, int32_t number, const float* w,
                 float* best, int32_t* at, double* sums) {
  BY_DIMS(join_to, x, blocks, dims, centroid, number, w, best, at, sums)
}
static void weigh(const float* x, int64_t blocks, int64_t dims, const float* centroids, int64_t count, const float* w,
                  const float* best, double* totals) {
  BY_DIMS(weigh_all, x, blocks, dims, centroids, count, w, best, totals)
}

}  // namespace rowwise_hashing::ISA
