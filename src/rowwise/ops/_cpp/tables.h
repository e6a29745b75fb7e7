// What the kernels are told about tables, features and a batch: plain structs over caller-owned memory.
//
// The Python side describes them as rows of int64 tensors (rowwise/ops/layout.py); the structs have the
// same fields in the same order, so a row of the tensor is one struct.
#pragma once
#include <atomic>
#include <cstdint>

namespace rowwise {

enum class Mode : int64_t { sum = 0, mean = 1, weighted = 2 };
enum class Rule : int64_t { sgd = 0, adagrad = 1, rowwise_adagrad = 2 };

struct Feature {
  int64_t source;  // which feature of the batch
  int64_t table;
  int64_t base;  // first element of the table in the arena
  int64_t rows;
  int64_t dim;
  int64_t column;  // first column of the pooled output
  Mode mode;
};

struct Table {
  int64_t base;
  int64_t rows;
  int64_t dim;
  int64_t state_base;
  int64_t state_width;  // floats of optimizer state in each row
  Rule rule;
  int64_t first_feature;
  int64_t num_features;
};

struct Hyper {  // one row of a float tensor
  float lr, eps, weight_decay, unused;
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
