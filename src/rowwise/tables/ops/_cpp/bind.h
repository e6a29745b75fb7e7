// Shared parts of the files that bind operators: checks of tensors, torch's threads, memory for outputs.
//
// Only libtorch's stable ABI is used, so one build serves every torch from 2.11 on.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "memory.h"
#include "tables.h"

namespace rowwise {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t pooled_bytes = 1 << 16;    // smaller outputs come from torch's own allocator
constexpr int64_t streamed_bytes = 4 << 20;  // larger outputs leave the caches before they are read anyway

inline void check_tensor(const Tensor& t, ScalarType type, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type && t.is_cpu(), "rowwise: ", name,
                  " must be a contiguous CPU tensor of the operator's type");
}

inline void check_ids(const Fault& fault, const Tensor& values) {
  if (!fault.found()) return;
  const int64_t at = fault.position.load();
  const int64_t id = values.scalar_type() == ScalarType::Long ? values.const_data_ptr<int64_t>()[at]
                                                              : values.const_data_ptr<int32_t>()[at];
  STD_TORCH_CHECK(false, "rowwise: id ", id, " at position ", at, " is outside its table");
}

// A tensor of 32- or 64-bit integers: ids, lengths or offsets, which a batch may hold as either.
struct Integers {
  const void* data;
  bool wide;
  int64_t count;

  Integers(const Tensor& t, const char* name) : wide(t.scalar_type() == ScalarType::Long), count(t.numel()) {
    check_tensor(t, wide ? ScalarType::Long : ScalarType::Int, name);
    data = t.const_data_ptr();
  }
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  ScalarType type() const { return wide ? ScalarType::Long : ScalarType::Int; }
};

// f with a zero of the type that the integers have, so that its loops are compiled for that type.
template <class F>
void with_type(bool wide, F f) {
  wide ? f(int64_t(0)) : f(int32_t(0));
}

// f(task) for each task, in any order, on torch's threads, so that no second pool competes for the cores.
inline void each_task(int64_t tasks, const std::function<void(int64_t)>& f) {
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(i);
  });
}

// Ranges of at most `size` of each feature's items, handed to f(feature, begin, end).
template <class Count, class F>
void each_range(int64_t features, int64_t size, Count count, F f) {
  std::vector<int64_t> first(size_t(features) + 1, 0);
  for (int64_t i = 0; i < features; ++i) first[size_t(i) + 1] = first[size_t(i)] + (count(i) + size - 1) / size;
  each_task(first.back(), [&](int64_t task) {
    const int64_t i = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
    const int64_t begin = (task - first[size_t(i)]) * size;
    f(i, begin, std::min(count(i), begin + size));
  });
}

// An output whose memory is kept for the next one when it is freed: fresh pages cost as much as a lookup.
inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType type = ScalarType::Float) {
  int64_t bytes = type == ScalarType::Long ? 8 : 4;
  for (int64_t s : shape) bytes *= s;
  if (bytes < pooled_bytes) return torch::stable::empty(shape, type);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * shape.begin()[d];
  return torch::stable::from_blob(acquire(size_t(bytes)), shape, strides,
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), type, &release);
}

}  // namespace rowwise
