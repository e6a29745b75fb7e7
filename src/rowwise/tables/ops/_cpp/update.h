// The update of all tables of one batch: group contributions by row, merge, apply.
#pragma once
#include <functional>
#include <vector>

#include "kernels.h"

namespace rowwise {

struct Parallel {  // torch's pool, so that no second one competes for the cores
  int threads;
  std::function<void(int64_t tasks, const std::function<void(int64_t)>&)> each;  // any order, any thread
};

struct UpdateCall {
  char* arena;
  float* state;
  const Table* tables;
  int64_t num_tables;
  const Hyper* hyper;
  const int64_t* keys;      // of each table's random numbers in this step
  const Feature* features;  // in table order
  Bags bags;
  const float* grad;
  int64_t grad_stride;  // pooled: columns of a sample
  bool per_id;          // one gradient row for each id instead of for each bag
  const int64_t* slot_rows;
};

struct BadRow {
  int64_t table = -1, row = -1;  // merged gradient is not finite; the row is unchanged
  int64_t position = -1;         // an id out of range
};

BadRow update(const UpdateCall&, const Kernels&, const Parallel&);

}  // namespace rowwise
