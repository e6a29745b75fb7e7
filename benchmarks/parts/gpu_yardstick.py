"""A lookup in CUDA as one writes it by hand: a group of lanes a bag, 16 bytes a lane, 4 rows under way."""

import torch
from torch import Tensor

from parts.gpu_work import Tables
from rowwise.tables.ops.layout import FeatureDescriptor

WARPS = 8  # of a block
SOURCE = """
typedef long long int64;
#define LANES (DIM / 4)

extern "C" __global__ void __launch_bounds__(256) pool(
    const char* __restrict__ arena, float* __restrict__ out, const int64* __restrict__ values,
    const int64* __restrict__ offsets, const int64* __restrict__ features, int batch, int columns) {
  const int lane = threadIdx.x % LANES;
  const int64 b = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
  const int64* feature = features + int64(blockIdx.y) * FIELDS;
  if (b >= batch) return;
  const int64 bag = feature[0] * batch + b, begin = offsets[bag], end = offsets[bag + 1], rows = feature[3];
  const char* base = arena + feature[2];
  float4 sum = {-0.f, -0.f, -0.f, -0.f};
  for (int64 i = begin; i < end; i += 4) {
    float4 x[4];
    bool use[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int64 row = i + u < end ? values[i + u] : -1;
      use[u] = row >= 0 && row < rows;
      if (use[u]) x[u] = reinterpret_cast<const float4*>(base + row * (DIM * 4))[lane];
    }
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (use[u]) sum.x += x[u].x, sum.y += x[u].y, sum.z += x[u].z, sum.w += x[u].w;
  }
  if (begin == end) sum = {0.f, 0.f, 0.f, 0.f};
  reinterpret_cast<float4*>(out + b * columns + feature[5])[lane] = sum;
}
"""


class Yardstick:
    """The lookup of tables of fp32 that are summed, compiled by the NVRTC of torch."""

    def __init__(self, tables: Tables) -> None:
        self._tables, dim = tables, tables.work.dim
        constants = f"#define DIM {dim}\n#define FIELDS {len(FeatureDescriptor._fields)}\n"
        self._kernel = torch.cuda._compile_kernel(constants + SOURCE, "pool")
        self._features = tables.features.to(tables.values.device)
        bags_of_block = WARPS * 32 // (dim // 4)
        self._grid = -(-tables.work.batch // bags_of_block), len(tables.features), 1

    def lookup(self) -> Tensor:
        tables = self._tables
        batch, columns = tables.work.batch, tables.group.columns
        out = torch.empty(batch, columns, device=tables.values.device)
        arguments = [tables.arena.rows, out, tables.values, tables.offsets, self._features, batch, columns]
        self._kernel(grid=self._grid, block=(WARPS * 32, 1, 1), args=arguments)
        return out
