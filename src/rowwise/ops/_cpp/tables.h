// What the kernels are told about tables, features and a batch: plain structs over caller-owned memory.
//
// The Python side describes them as rows of int64 tensors (rowwise/ops/layout.py); the structs have the
// same fields in the same order, so a row of the tensor is one struct.
#pragma once
#include <atomic>
#include <cstdint>

namespace rowwise {

enum class Mode : int64_t { sum = 0, mean = 1, weighted = 2 };
enum class Rule : int64_t { sgd = 0, adagrad = 1, rowwise_adagrad = 2, adam = 3, rowwise_adam = 4, lamb = 5, ftrl = 6 };
constexpr int64_t num_rules = 7;
enum class RowType : int64_t { fp32 = 0, fp16 = 1, bf16 = 2, int8 = 3 };
constexpr int64_t num_row_types = 4;

// [Note: Row formats]
// fp32, fp16 and bf16 rows are their columns. An int8 row begins with (scale, offset) as two floats for each group
// of columns, then has one byte for each column, padded to four: weight = code * scale + offset, two roundings.
struct Format {
  RowType type;
  int64_t dim;
  int64_t group;  // columns that share a scale; 0: all of them

  int64_t groups() const { return group ? (dim + group - 1) / group : 1; }
  int64_t header() const { return type == RowType::int8 ? groups() * 8 : 0; }
  int64_t bytes() const {
    switch (type) {
      case RowType::fp32:
        return dim * 4;
      case RowType::fp16:
      case RowType::bf16:
        return dim * 2;
      case RowType::int8:
        return header() + (dim + 3) / 4 * 4;
    }
    return 0;
  }
};

// Of a row in half a byte a column, see [Note: Four bits] in quantise.h.
inline int64_t packed4_bytes(int64_t dim) { return 8 + (dim + 7) / 8 * 4; }

struct Feature {
  int64_t source;  // which feature of the batch
  int64_t table;
  int64_t base;  // first byte of the table in the arena
  int64_t rows;
  int64_t dim;
  int64_t column;  // first column of the pooled output
  Mode mode;
  RowType type;
  int64_t group;
  Format format() const { return {type, dim, group}; }
};

struct Table {
  int64_t base;
  int64_t rows;
  int64_t dim;
  int64_t state_base;   // first float
  int64_t state_width;  // floats of optimizer state in each row
  Rule rule;
  int64_t first_feature;
  int64_t num_features;
  RowType type;
  int64_t group;
  int64_t first_row, first_column;  // where a tile begins in the whole table: random bits go by places there
  Format format() const { return {type, dim, group}; }
};

struct Hyper {  // one row of a float tensor
  float lr, eps, weight_decay;
  float clip;  // longest gradient of a row; 0: any
  union {
    struct {
      float beta1, beta2, inverse1, inverse2;  // inverse: 1 / (1 - beta ** step)
    } moments;
    struct {
      float l1, l2, beta, unused;
    } ftrl;
  };
};

// How many floats of state a row needs at least.
inline int64_t state_floats(Rule rule, int64_t dim) {
  switch (rule) {
    case Rule::sgd:
      return 0;
    case Rule::adagrad:
      return dim;
    case Rule::rowwise_adagrad:
      return 1;
    case Rule::rowwise_adam:
      return dim + 1;
    case Rule::adam:
    case Rule::lamb:
    case Rule::ftrl:
      return 2 * dim;
  }
  return 0;
}

// One feature-major batch: bag (f, b) holds values[offsets[f * B + b] .. offsets[f * B + b + 1]).
struct Bags {
  const void* values;
  bool wide_ids;  // int64, else int32
  const int64_t* offsets;
  const float* weights;  // nullptr where no feature is weighted
  int64_t batch;
};

// The first bad id of a call; kernels skip bad ids, so nothing outside a table is read or written.
struct Fault {
  std::atomic<int64_t> position{INT64_MAX};
  __attribute__((noinline, cold)) void at(int64_t i) {
    int64_t seen = position.load(std::memory_order_relaxed);
    while (i < seen && !position.compare_exchange_weak(seen, i, std::memory_order_relaxed)) {
    }
  }
  bool found() const { return position.load() != INT64_MAX; }
};

// [Note: Merge order]
// Contributions to a row are summed in (sample, feature, position) order within blocks of 256 samples, then
// by a pairwise tree over block indices; a node whose sibling is absent passes up unchanged.
constexpr int block_shift = 8;

}  // namespace rowwise
