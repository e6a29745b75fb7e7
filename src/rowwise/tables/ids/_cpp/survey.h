// Statistics of ranges of points, and the clusters of ranges that have a cluster for each distinct vector.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace rowwise_hashing {

// The points of a range sorted by vector, so that equal vectors are runs; 0 and -0 are equal.
class Runs {
 public:
  void sort(const Points& points, int64_t begin, int64_t end) {
    points_ = &points;
    order_.assign(points.order + begin, points.order + end);
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      const float *left = at(a), *right = at(b);
      for (int64_t d = 0; d < points.dims; ++d)
        if (left[d] != right[d]) return left[d] < right[d];
      return a < b;
    });
  }

  // Whether the i-th point begins a run.
  bool begins(size_t i) const {
    if (i == 0) return true;
    return !std::equal(at(order_[i]), at(order_[i]) + points_->dims, at(order_[i - 1]));
  }

  int64_t count() const {
    int64_t runs = 0;
    for (size_t i = 0; i < order_.size(); ++i) runs += begins(i);
    return runs;
  }

  int64_t firsts(int32_t* out) const {
    int64_t runs = 0;
    for (size_t i = 0; i < order_.size(); ++i)
      if (begins(i)) out[runs++] = order_[i];
    return runs;
  }

  // Writes a cluster for each run.
  int64_t write(const Cell& cell, const Out& out) const {
    int64_t k = cell.base - 1;
    for (size_t i = 0; i < order_.size(); ++i) {
      if (begins(i)) {
        ++k;
        std::copy(at(order_[i]), at(order_[i]) + points_->dims, out.centroid + k * points_->dims);
        out.weight[k] = 0;
      }
      out.weight[k] += points_->w[order_[i]];
      if (out.label) out.label[order_[i]] = int32_t(k);
    }
    return k + 1 - cell.base;
  }

 private:
  const float* at(int32_t point) const { return points_->x + int64_t(point) * points_->dims; }

  const Points* points_ = nullptr;
  std::vector<int32_t> order_;
};

inline Survey survey(const Points& points, const Cell& cell, double cap, Runs& runs) {
  Survey found{};
  const int64_t dims = points.dims;
  std::vector<double> mean(size_t(dims), 0);
  for (int64_t i = cell.begin; i < cell.end; ++i) {
    const double w = points.w[points.order[i]];
    found.weight += w;
    if (w > cap) ++found.heavy, found.heavy_weight += w;
    const float* x = points.x + int64_t(points.order[i]) * dims;
    for (int64_t d = 0; d < dims; ++d) mean[size_t(d)] += w * points.scale * double(x[d]);
  }
  for (double& x : mean) x /= found.weight > 0 ? found.weight : 1;
  for (int64_t i = cell.begin; i < cell.end; ++i) {
    const float* x = points.x + int64_t(points.order[i]) * dims;
    double far = 0;
    for (int64_t d = 0; d < dims; ++d) {
      const double away = points.scale * double(x[d]) - mean[size_t(d)];
      far += away * away;
    }
    found.spread += points.w[points.order[i]] * far;
  }
  runs.sort(points, cell.begin, cell.end);
  found.distinct = runs.count();
  return found;
}

}  // namespace rowwise_hashing
