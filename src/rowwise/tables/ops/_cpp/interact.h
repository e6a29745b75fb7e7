// DLRM's interaction: the dot products of every two vectors of a sample, and their gradient.
//
// Included by isa.cpp only, once per instruction set. A sample is worked on in the first-level cache while the next
// one is prefetched, and the matrix of all pairs is never made. Forward: the sample is transposed, so that lanes are
// neighbouring pairs, and the lower triangle is made in blocks of some rows by one or two vectors of lanes. Backward:
// lanes are columns, and some vectors' gradients are summed at once, over all other vectors of the sample.
#pragma once
#include <cstring>
#include <utility>

#include "kernels.h"
#include "simd.h"
#include "sums.h"

namespace rowwise::ISA {

namespace {

// The number of rows of sums, of `vectors` vectors each, that stay in registers beside their operands.
constexpr int rows_at_once(int vectors) { return std::clamp((LANES == 16 ? 24 : 12) / vectors, 1, 8); }

inline int64_t pairs_before(int64_t row) { return row * (row - 1) / 2; }

struct Vectors {  // of one sample: the dense one first
  const float* dense;
  const float* pooled;
  int64_t dim, count;

  Vectors(const Interaction& in, int64_t b)
      : dense(in.dense + b * in.dim),
        pooled(in.pooled + b * in.features * in.dim),
        dim(in.dim),
        count(in.features + 1) {}
  const float* at(int64_t i) const { return i ? pooled + (i - 1) * dim : dense; }
};

// One step of a transposition: blocks of `step` columns change places between two rows that are `step` apart.
template <int step, int... K>
inline void exchange(Wide& a, Wide& b, std::integer_sequence<int, K...>) {
  const Wide low = __builtin_shufflevector(a, b, (K & step ? LANES + K - step : K)...);
  b = __builtin_shufflevector(a, b, (K & step ? LANES + K : K + step)...);
  a = low;
}

template <int step>
inline void transpose(Wide (&m)[LANES]) {
#pragma GCC unroll 16
  for (int r = 0; r < LANES; ++r)
    if (!(r & step)) exchange<step>(m[r], m[r + step], std::make_integer_sequence<int, LANES>{});
  if constexpr (step > 1) transpose<step / 2>(m);
}

// Columns [c, c + LANES) of vectors [t, t + LANES) become rows; the last vector stands for those past it.
template <class Load>
inline void transpose_block(const Vectors& x, int64_t t, int64_t rows, float* out, int64_t stride, Load load) {
  Wide m[LANES];
#pragma GCC unroll 16
  for (int r = 0; r < LANES; ++r) m[r] = load(x.at(std::min(t + r, x.count - 1)));
  transpose<LANES / 2>(m);
  if (rows == LANES) {
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) Vec<Wide>::store(out + r * stride, m[r]);
    return;
  }
  float edge[LANES][LANES];
  for (int r = 0; r < LANES; ++r) Vec<Wide>::store(edge[r], m[r]);
  for (int r = 0; r < rows; ++r) Vec<Wide>::store(out + r * stride, Vec<Wide>::load(edge[r]));
}

// The sample as [dim, stride], its vectors side by side.
inline void transpose_sample(const Vectors& x, float* out, int64_t stride) {
  for (int64_t c = 0; c < x.dim; c += LANES) {
    const int64_t rows = std::min<int64_t>(LANES, x.dim - c);
    for (int64_t t = 0; t < x.count; t += LANES) {
      float* block = out + c * stride + t;
      if (rows == LANES) {
        transpose_block(x, t, rows, block, stride, [&](const float* row) { return Vec<Wide>::load(row + c); });
        continue;
      }
      transpose_block(x, t, rows, block, stride, [&](const float* row) {
        float edge[LANES] = {};
        for (int64_t k = 0; k < rows; ++k) edge[k] = row[c + k];
        return Vec<Wide>::load(edge);
      });
    }
  }
}

// Prefetches the next sample a line at a time: all at once is more than a core keeps in flight.
struct Ahead {
  const char *next, *end;

  Ahead(const float* data, int64_t floats) : next(reinterpret_cast<const char*>(data)), end(next + floats * 4) {}
  __attribute__((always_inline)) void step() {
    if (next < end) __builtin_prefetch(next, 0, 3), next += 64;
  }
};

// Pairs (i .. i + R, j .. j + N vectors) of a transposed sample.
template <class V, int R, int N>
void make_pairs(const float* x, int64_t stride, int64_t dim, int64_t i, int64_t j, float* triangle, Ahead& ahead) {
  constexpr int W = Vec<V>::width;
  V sum[R][N] = {};
  const float *left = x + i, *right = x + j;
  for (int64_t c = 0; c < dim; ++c, left += stride, right += stride) {
    ahead.step();
    V columns[N];
    for (int k = 0; k < N; ++k) columns[k] = Vec<V>::load(right + k * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < N; ++k) sum[r][k] = fused(left[r] - V{}, columns[k], sum[r][k]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < N; ++k) Vec<V>::store(triangle + pairs_before(i + r) + j + k * W, sum[r][k]);
}

constexpr int group = Vec<Half>::width;  // rows whose pairs end in the same half vector

// A row's last vector reaches past the diagonal, over the first pairs of the rows after it. So rows are written
// in order, and each row's last vector before its first.
inline void make_triangle(const float* x, int64_t stride, int64_t dim, int64_t count, float* triangle, Ahead& ahead) {
  for (int64_t begin = 1; begin < count; begin += group) {
    for_blocks(begin, std::min<int64_t>(begin + group, count), rows_at_once(2), [&](int64_t i, int64_t rows) {
      with_constant<rows_at_once(2)>(rows, [&](auto r) {
        constexpr int R = decltype(r)::value;
        int64_t j = (begin - 1) / group * group + group;
        if (j % LANES) make_pairs<Half, R, 1>(x, stride, dim, i, j -= group, triangle, ahead);
        if (j % (2 * LANES)) make_pairs<Wide, R, 1>(x, stride, dim, i, j -= LANES, triangle, ahead);
        while (j) make_pairs<Wide, R, 2>(x, stride, dim, i, j -= 2 * LANES, triangle, ahead);
      });
    });
  }
}

void interact(const Interaction& in, float* out, int64_t b0, int64_t b1, float* scratch) {
  const int64_t count = in.features + 1, pooled = in.features * in.dim;
  const int64_t pairs = pairs_before(count), columns = in.dim + pairs;
  float* last = scratch + in.dim * in.stride;  // a triangle with room for what is written past its end
  out += b0 * columns;
  for (int64_t b = b0; b < b1; ++b, out += columns) {
    const Vectors x(in, b);
    transpose_sample(x, scratch, in.stride);
    Ahead ahead(x.pooled + pooled, b + 1 < b1 ? pooled : 0);
    // What is written past a triangle falls on samples that this task writes later, if there are enough of them.
    const bool room = (b1 - b - 1) * columns >= LANES;
    make_triangle(scratch, in.stride, in.dim, count, room ? out + in.dim : last, ahead);
    if (!room) std::memcpy(out + in.dim, last, size_t(pairs) * 4);
    std::memcpy(out, x.dense, size_t(in.dim) * 4);
  }
}

struct Gradient {  // of one sample
  float* dense;
  float* pooled;
  bool stream;
  const float* passed;  // the part of the dense vector's gradient that no product contributes to
};

// Columns [c, c + N vectors) of the gradients of vectors [i, i + R): each the sum of the other vectors, times the
// gradient of the pair. That is in the vector's own row of the triangle, or for later vectors in theirs.
template <class V, int R, int N>
void make_products(const Vectors& x, const float* triangle, int64_t i, int64_t c, const Gradient& out, Ahead& ahead) {
  constexpr int W = Vec<V>::width;
  V sum[R][N] = {};
  const float* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) rows[r] = triangle + pairs_before(i + r);
  for (int64_t j = 0; j < i; ++j) {
    ahead.step();
    const float* from = x.at(j) + c;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < N; ++k) sum[r][k] = fused(rows[r][j] - V{}, Vec<V>::load(from + k * W), sum[r][k]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < R; ++j) {
    const float* from = x.at(i + j) + c;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      if (r != j)
        for (int k = 0; k < N; ++k)
          sum[r][k] = fused((r > j ? rows[r][i + j] : rows[j][i + r]) - V{}, Vec<V>::load(from + k * W), sum[r][k]);
  }
  for (int64_t j = i + R; j < x.count; ++j) {
    ahead.step();
    const float *from = x.at(j) + c, *row = triangle + pairs_before(j) + i;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < N; ++k) sum[r][k] = fused(row[r] - V{}, Vec<V>::load(from + k * W), sum[r][k]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* to = i + r ? out.pooled + (i + r - 1) * x.dim + c : out.dense + c;
    if (i + r == 0)
      for (int k = 0; k < N; ++k) sum[r][k] += Vec<V>::load(out.passed + c + k * W);
    for (int k = 0; k < N; ++k)
      out.stream ? Vec<V>::stream(to + k * W, sum[r][k]) : Vec<V>::store(to + k * W, sum[r][k]);
  }
}

void interact_grad(const Interaction& in, const float* grad, const InteractionGrad& to, int64_t b0, int64_t b1) {
  const int64_t count = in.features + 1, pooled = in.features * in.dim, columns = in.dim + pairs_before(count);
  for (int64_t b = b0; b < b1; ++b) {
    const Vectors x(in, b);
    const Gradient out{to.dense + b * in.dim, to.pooled + b * pooled, to.stream, grad + b * columns};
    Ahead ahead(x.pooled + pooled, b + 1 < b1 ? pooled : 0);
    for_strips(in.dim, [&](auto strip, int64_t c) {
      using V = typename decltype(strip)::type;
      constexpr int N = decltype(strip)::count;
      for_blocks(0, count, rows_at_once(N), [&](int64_t i, int64_t rows) {
        with_constant<rows_at_once(N)>(
            rows, [&](auto r) { make_products<V, decltype(r)::value, N>(x, out.passed + in.dim, i, c, out, ahead); });
      });
    });
  }
  if (to.stream) stream_fence();
}

}  // namespace
}  // namespace rowwise::ISA
