// A chain of linear layers with ReLUs for inference: each output is one sum, in the order of its inputs.
//
// Included by isa.cpp only, once per instruction set. Lanes are outputs, so a row's bits do not depend on the rows
// beside it, nor on how many they are. Weights are packed as panels of `panel` outputs: the biases, then a line for
// each input. Some rows by some panels are summed at once in registers: few rows take more panels, else each sum waits
// for itself. Products are added as in [Note: Contracted sums].
#pragma once
#include <cstring>

#include "kernels.h"
#include "simd.h"
#include "sums.h"

namespace rowwise::ISA {
namespace {

constexpr int panel_vectors = panel / LANES;
constexpr int sums_at_once = LANES == 16 ? 24 : 12;  // vectors that stay in registers beside their operands
constexpr int layer_rows = sums_at_once / (panel_vectors * (LANES == 16 ? 2 : 1));
// 0: so many panels need more registers than there are.
constexpr int most_rows(int panels) { return std::min(layer_rows, sums_at_once / (panel_vectors * panels)); }

// Rows [0, R) of panels [0, P); `columns`: of the output, that are left. Not inlined: in one function with the others,
// GCC keeps sums in memory.
template <int R, int P>
__attribute__((noinline)) void make_outputs(const Layer& layer, const float* weights, const float* x, float* out,
                                            int64_t columns) {
  constexpr int N = panel_vectors;
  const int64_t size = (layer.in + 1) * panel;
  Wide sum[R][P * N];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int k = 0; k < N; ++k) {
      const Wide bias = Vec<Wide>::load(weights + p * size + k * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][p * N + k] = bias;
    }
  const float* line = weights + panel;
  for (int64_t i = 0; i < layer.in; ++i, line += panel) {
    Wide w[P * N];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int k = 0; k < N; ++k) w[p * N + k] = Vec<Wide>::load(line + p * size + k * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Wide value = x[r * layer.in + i] - Wide{};
#pragma GCC unroll 16
      for (int k = 0; k < P * N; ++k) sum[r][k] = fused(value, w[k], sum[r][k]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float edge[P * panel], *to = out + r * layer.out;
    const bool whole = columns >= P * panel;
#pragma GCC unroll 16
    for (int k = 0; k < P * N; ++k) {
      Wide v = sum[r][k];
      if (layer.relu) v = v < 0.f ? Wide{} : v;  // NaN stays: a diverged model must not look healthy
      Vec<Wide>::store((whole ? to : edge) + k * LANES, v);
    }
    if (!whole) std::memcpy(to, edge, size_t(columns) * 4);
  }
}

// All rows by P panels.
template <int P>
void make_panels(const Layer& layer, const float* weights, const float* x, float* out, int64_t rows, int64_t columns) {
  for_blocks(0, rows, layer_rows, [&](int64_t r, int64_t count) {
    with_constant<std::max(1, most_rows(P))>(count, [&](auto n) {
      make_outputs<decltype(n)::value, P>(layer, weights, x + r * layer.in, out + r * layer.out, columns);
    });
  });
}

}  // namespace

void layer(const Layer& layer, const float* x, float* out, int64_t rows) {
  const int64_t panels = (layer.out + panel - 1) / panel, size = (layer.in + 1) * panel;
  const int64_t blocks = (rows + layer_rows - 1) / layer_rows, most = blocks ? (rows + blocks - 1) / blocks : 0;
  for (int64_t p = 0; p < panels;) {
    const int64_t left = panels - p, columns = layer.out - p * panel;
    const float* weights = layer.weights + p * size;
    const auto fits = [&](int count) { return left >= count && most <= most_rows(count); };
    int taken = 1;
    if (fits(8))
      make_panels<8>(layer, weights, x, out + p * panel, rows, columns), taken = 8;
    else if (fits(4))
      make_panels<4>(layer, weights, x, out + p * panel, rows, columns), taken = 4;
    else if (fits(2))
      make_panels<2>(layer, weights, x, out + p * panel, rows, columns), taken = 2;
    else
      make_panels<1>(layer, weights, x, out + p * panel, rows, columns);
    p += taken;
  }
}

}  // namespace rowwise::ISA
