// The sum of the dot products of all pairs of a sample's vectors (a factorization machine), and its gradient.
//
// Included by isa.cpp only, once per instruction set. With s the sum of the vectors, twice the sum of the pairs is
// s * s less the squares of the vectors, summed over columns: one pass over the sample. The gradient of a vector is s
// less the vector. Nothing is contracted, so all instruction sets and the reference agree bit for bit.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace rowwise::ISA {
namespace {

// f(sum of the offset and the vectors, sum of their squares, column) for every column.
template <class F>
inline void each_sum(const float* offset, const float* pooled, int64_t dim, int64_t features, F f) {
  each_vector(dim, [&](auto kind, int64_t c) __attribute__((always_inline)) {
    using V = decltype(kind);
    V sum = Vec<V>::load(offset + c), squares{};
    for (int64_t k = 0; k < features; ++k) {
      const V v = Vec<V>::load(pooled + k * dim + c);
      sum += v;
      squares += v * v;
    }
    f(sum, squares, c);
  });
}

}  // namespace

void pair_sums(const Interaction& in, float* out, int64_t b0, int64_t b1, float* scratch) {
  const int64_t columns = in.features * in.dim;
  for (int64_t b = b0; b < b1; ++b) {
    each_sum(in.dense + b * in.dim, in.pooled + b * columns, in.dim, in.features,
             [&](auto sum, auto squares, int64_t c) { Vec<decltype(sum)>::store(scratch + c, sum * sum - squares); });
    out[b] = column_sum<0>(in.dim, [&](int64_t c) { return quad_at(scratch, c, in.dim); }) * 0.5f;
  }
}

void pair_sums_grad(const Interaction& in, const float* grad, const InteractionGrad& to, int64_t b0, int64_t b1) {
  const int64_t columns = in.features * in.dim;
  for (int64_t b = b0; b < b1; ++b) {
    const float g = grad[b];
    const float* pooled = in.pooled + b * columns;
    float *dense_grad = to.dense + b * in.dim, *pooled_grad = to.pooled + b * columns;
    each_sum(in.dense + b * in.dim, pooled, in.dim, in.features, [&](auto sum, auto, int64_t c) {
      using V = decltype(sum);
      Vec<V>::store(dense_grad + c, sum * g);
      for (int64_t k = 0; k < in.features; ++k)
        Vec<V>::store(pooled_grad + k * in.dim + c, (sum - Vec<V>::load(pooled + k * in.dim + c)) * g);
    });
  }
}

}  // namespace rowwise::ISA
