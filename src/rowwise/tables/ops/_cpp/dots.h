// Dot products of one vector with rows of a matrix: each in one fixed order, whatever is computed beside it.
//
// Included by isa.cpp only, once per instruction set. The products of a row are summed as [Note: Column sums] says, and
// nothing is contracted, so all instruction sets and the reference agree bit for bit.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace rowwise::ISA {
namespace {

constexpr int64_t dots_ahead = 8;  // that are prefetched: rows by place are in no order that a processor foresees

template <int D>
void dots_of(const Dots& in, float* out, int64_t i0, int64_t i1) {
  for (int64_t i = i0; i < i1; ++i) {
    if (in.places && i + dots_ahead < i1)
      prefetch(reinterpret_cast<const char*>(in.rows + in.places[i + dots_ahead] * in.dim), in.dim * 4, false);
    const float* row = in.rows + (in.places ? in.places[i] : i) * in.dim;
    out[i] = column_sum<D>(in.dim, [&](int64_t c) __attribute__((always_inline)) {
      return quad_at(in.query, c, in.dim) * quad_at(row, c, in.dim);
    });
  }
}

}  // namespace

void dots(const Dots& in, float* out, int64_t i0, int64_t i1) {
  switch (in.dim) {
    case 32:
      return dots_of<32>(in, out, i0, i1);
    case 64:
      return dots_of<64>(in, out, i0, i1);
    case 128:
      return dots_of<128>(in, out, i0, i1);
    default:
      return dots_of<0>(in, out, i0, i1);
  }
}

}  // namespace rowwise::ISA
