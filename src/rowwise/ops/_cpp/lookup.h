// Table lookups of one device: pooled, per id, the gradient of per-id weights, and the gather limit.
//
// Included by isa.cpp only, once per instruction set. Rows are summed in the order of the ids, with each column of up
// to eight vectors held in registers; rows some ids ahead are prefetched, as random rows come from memory.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace rowwise::ISA {
namespace {

// How many rows ahead to prefetch: about four kilobytes, which is what a core can keep in flight.
inline int64_t rows_ahead(int64_t dim) { return std::clamp<int64_t>(1024 / dim, 8, 32); }

template <class Id>
struct Rows {  // the rows of one feature, in the order of its ids
  const float* table;
  uint64_t rows;
  int64_t dim;
  const Id* ids;
  int64_t last;  // one past the feature's ids
  int64_t ahead;
  bool whole;

  Rows(const float* arena, const Feature& f, const Bags& bags)
      : table(arena + f.base),
        rows(uint64_t(f.rows)),
        dim(f.dim),
        ids(static_cast<const Id*>(bags.values)),
        last(bags.offsets[(f.source + 1) * bags.batch]),
        ahead(rows_ahead(f.dim)),
        whole(whole_lines(f.dim)) {}

  // Of an id that is out of range too: a prefetch never faults.
  const float* ahead_of(int64_t i) const {
    const uint64_t id = uint64_t(int64_t(ids[std::min(i + ahead, last - 1)]));
    return reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(table) + id * uint64_t(dim) * 4);
  }
  const float* at(int64_t i) const {  // nullptr: out of range
    uint64_t id = uint64_t(int64_t(ids[i]));
    return id < rows ? table + id * uint64_t(dim) : nullptr;
  }
};

struct Columns {  // a strip of columns of a range of bags
  int64_t b0, b1, column;
  const int64_t* offsets;
  const float* weights;  // nullptr: not weighted
  bool mean;
  float* out;
  int64_t out_stride;
  bool stream;
};

// Everything the inner loop needs is copied to locals: what a reference points to would be loaded anew after
// every possible report of a bad id.
template <class V, int N, bool weighted, class Id>
void pool_strip(const Rows<Id>& feature_rows, const Columns& columns, Fault& fault) {
  constexpr int W = Vec<V>::width;
  const Rows<Id> rows = feature_rows;
  const Columns c = columns;
  int64_t begin = c.offsets[c.b0];
  for (int64_t b = c.b0; b < c.b1; ++b) {
    const int64_t end = c.offsets[b + 1];
    V sum[N];
    for (int k = 0; k < N; ++k) sum[k] = V{};
    for (int64_t i = begin; i < end; ++i) {
      prefetch<V, N>(rows.ahead_of(i) + c.column, rows.whole);
      const float* row = rows.at(i);
      if (__builtin_expect(row == nullptr, 0)) {
        fault.at(i);
        continue;
      }
      for (int k = 0; k < N; ++k) {
        const V term = Vec<V>::load(row + c.column + k * W);
        sum[k] += weighted ? term * c.weights[i] : term;
      }
    }
    if (c.mean && end > begin) {
      const float inverse = 1.0f / float(end - begin);
      for (int k = 0; k < N; ++k) sum[k] *= inverse;
    }
    float* out = c.out + b * c.out_stride + c.column;
    if (c.stream)
      for (int k = 0; k < N; ++k) Vec<V>::stream(out + k * W, sum[k]);
    else
      for (int k = 0; k < N; ++k) Vec<V>::store(out + k * W, sum[k]);
    begin = end;
  }
}

template <class Id>
void pool_bags(const Rows<Id>& rows, Columns c, Fault& fault) {
  for_strips(rows.dim, [&](auto strip, int64_t column) {
    using V = typename decltype(strip)::type;
    constexpr int N = decltype(strip)::count;
    c.column = column;
    c.weights ? pool_strip<V, N, true>(rows, c, fault) : pool_strip<V, N, false>(rows, c, fault);
  });
}

template <class Id>
void pool_as(const float* arena, const Feature& f, const Bags& bags, Columns c, Fault& fault) {
  const Rows<Id> rows(arena, f, bags);
  if (is_one_strip(rows.dim)) return pool_bags(rows, c, fault);
  for (int64_t b = c.b0, b1 = c.b1; b < b1; ++b) {  // bag by bag: the later strips find the rows in cache
    c.b0 = b, c.b1 = b + 1;
    pool_bags(rows, c, fault);
  }
}

void pool(const float* arena, const Feature& f, const Bags& bags, float* out, int64_t out_stride, int64_t b0,
          int64_t b1, bool stream, Fault& fault) {
  const Columns c{b0,
                  b1,
                  0,
                  bags.offsets + f.source * bags.batch,
                  f.mode == Mode::weighted ? bags.weights : nullptr,
                  f.mode == Mode::mean,
                  out + f.column,
                  out_stride,
                  stream};
  bags.wide_ids ? pool_as<int64_t>(arena, f, bags, c, fault) : pool_as<int32_t>(arena, f, bags, c, fault);
  if (stream) stream_fence();
}

template <class Id>
void gather_as(const Rows<Id>& rows, float* out, int64_t i0, int64_t i1, Fault& fault) {
  for (int64_t i = i0; i < i1; ++i, out += rows.dim) {
    prefetch_row(rows.ahead_of(i), rows.dim);
    const float* row = rows.at(i);
    if (__builtin_expect(row == nullptr, 0)) {
      fault.at(i);
      continue;
    }
    for_strips(rows.dim, [&](auto strip, int64_t column) {
      using V = typename decltype(strip)::type;
      for (int k = 0; k < decltype(strip)::count; ++k) {
        const int64_t at = column + k * Vec<V>::width;
        Vec<V>::store(out + at, Vec<V>::load(row + at));
      }
    });
  }
}

void gather(const float* arena, const Feature& f, const Bags& bags, float* out, int64_t i0, int64_t i1, Fault& fault) {
  bags.wide_ids ? gather_as(Rows<int64_t>(arena, f, bags), out, i0, i1, fault)
                : gather_as(Rows<int32_t>(arena, f, bags), out, i0, i1, fault);
}

template <class Id>
void weight_grad_as(const Rows<Id>& rows, const int64_t* offsets, const float* grad, int64_t grad_stride, int64_t b0,
                    int64_t b1, float* out, Fault& fault) {
  for (int64_t b = b0; b < b1; ++b) {
    const float* g = grad + b * grad_stride;
    for (int64_t i = offsets[b]; i < offsets[b + 1]; ++i) {
      prefetch_row(rows.ahead_of(i), rows.dim);
      const float* row = rows.at(i);
      if (__builtin_expect(row == nullptr, 0)) {
        fault.at(i);
        continue;
      }
      out[i] = column_sum(rows.dim, [&](int64_t c) { return quad_at(row, c, rows.dim) * quad_at(g, c, rows.dim); });
    }
  }
}

void weight_grad(const float* arena, const Feature& f, const Bags& bags, const float* grad, int64_t grad_stride,
                 int64_t b0, int64_t b1, float* out, Fault& fault) {
  const int64_t* offsets = bags.offsets + f.source * bags.batch;
  grad += f.column;
  bags.wide_ids ? weight_grad_as(Rows<int64_t>(arena, f, bags), offsets, grad, grad_stride, b0, b1, out, fault)
                : weight_grad_as(Rows<int32_t>(arena, f, bags), offsets, grad, grad_stride, b0, b1, out, fault);
}

// The gather limit: every byte of every row is read once, in the order of the ids, and nothing else is done.
template <class V, int N, class Id>
float touch_strip(const Rows<Id>& rows, int64_t column, int64_t i0, int64_t i1) {
  V sum[N] = {};
  for (int64_t i = i0; i < i1; ++i) {
    prefetch<V, N>(rows.ahead_of(i) + column, rows.whole);
    const float* row = rows.at(i);
    if (row)
      for (int k = 0; k < N; ++k) sum[k] += Vec<V>::load(row + column + k * Vec<V>::width);
  }
  float lanes[LANES * N], total = 0.f;
  for (int k = 0; k < N; ++k) Vec<V>::store(lanes + k * Vec<V>::width, sum[k]);
  for (int k = 0; k < N * Vec<V>::width; ++k) total += lanes[k];
  return total;
}

template <class Id>
float touch_as(const Rows<Id>& rows, int64_t i0, int64_t i1) {
  float total = 0.f;
  for_strips(rows.dim, [&](auto strip, int64_t column) {
    total += touch_strip<typename decltype(strip)::type, decltype(strip)::count>(rows, column, i0, i1);
  });
  return total;
}

float touch(const float* arena, const Feature& f, const Bags& bags, int64_t i0, int64_t i1) {
  return bags.wide_ids ? touch_as(Rows<int64_t>(arena, f, bags), i0, i1)
                       : touch_as(Rows<int32_t>(arena, f, bags), i0, i1);
}

}  // namespace
}  // namespace rowwise::ISA
