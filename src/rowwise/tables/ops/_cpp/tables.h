// Descriptors of tables, features and a batch for the kernels: plain structs over caller-owned memory.
//
// The Python side describes them as rows of int64 tensors (rowwise/tables/ops/layout.py); the structs have the
// same fields in the same order, so a row of the tensor is one struct.
#pragma once
#include <atomic>
#include <cstdint>

namespace rowwise {

enum class Mode : int64_t { sum = 0, mean = 1, weighted = 2 };
// Types of rows: name, bits of a weight, and whether a group of columns has a scale and an offset. Python's records
// (`RowType` in rowwise/tables/spec.py) have the same names in the same order, which is checked when the library is
// loaded.
#define ROWWISE_ROW_TYPES(X) \
  X(fp32, 32, false)         \
  X(fp16, 16, false)         \
  X(bf16, 16, false)         \
  X(int8, 8, true)           \
  X(int4, 4, true)

#define ROWWISE_ENUMERATOR(name, bits, scaled) name,
enum class RowType : int64_t { ROWWISE_ROW_TYPES(ROWWISE_ENUMERATOR) };
#undef ROWWISE_ENUMERATOR

struct RowTypeFacts {
  const char* name;
  int64_t weight_bits;
  bool scaled;
};
#define ROWWISE_FACTS(name, bits, scaled) {#name, bits, scaled},
constexpr RowTypeFacts row_types[] = {ROWWISE_ROW_TYPES(ROWWISE_FACTS)};
#undef ROWWISE_FACTS
constexpr int64_t num_row_types = sizeof row_types / sizeof *row_types;
constexpr const RowTypeFacts& facts_of(RowType type) { return row_types[int64_t(type)]; }
constexpr bool is_updated(RowType type) { return type != RowType::int4; }  // others are only looked up

// [Note: Row formats]
// A row is its columns. One of a type with scales begins with (scale, offset) as two floats for each group of columns,
// then has its columns, padded to four bytes: weight = code * scale + offset, two roundings. A code of int4 is half a
// byte, that of an even column the low half; see [Note: Four bits] in quantise.h.
struct Format {
  RowType type;
  int64_t dim;
  int64_t group;  // columns that share a scale; 0: all of them

  int64_t groups() const { return group ? (dim + group - 1) / group : 1; }
  int64_t header() const { return facts_of(type).scaled ? groups() * 8 : 0; }
  int64_t bytes() const {
    const int64_t weights = (dim * facts_of(type).weight_bits + 7) / 8;
    return facts_of(type).scaled ? header() + (weights + 3) / 4 * 4 : weights;
  }
};

inline int64_t packed4_bytes(int64_t dim) { return Format{RowType::int4, dim, 0}.bytes(); }

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
  int64_t rule;         // which optimizer, see `Optimizers` in apply.h
  int64_t first_feature;
  int64_t num_features;
  RowType type;
  int64_t group;
  int64_t first_row, first_column;  // where a tile begins in the whole table: random bits go by places there
  int64_t slot_rows;                // of a table on disk: where the rows of its slots are listed; -1: slots are rows
  Format format() const { return {type, dim, group}; }
};

struct Hyper {  // one row of a float tensor
  float lr, eps, weight_decay;
  float clip;    // longest gradient of a row; 0: any
  float own[4];  // those that only some optimizers have
};

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
