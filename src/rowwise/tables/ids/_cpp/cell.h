// Clusters one cell: copies its points into blocks, draws seeds, and moves points between clusters until none moves.
//
// [Note: A cell] Seeds are drawn one by one, as in greedy k-means++ (Arthur & Vassilvitskii 2007): a few candidates are
// drawn by weight times squared distance to the nearest seed so far, and the one that lowers the error most is used.
// Then Lloyd's algorithm alternates: centroids become weighted means of their points, points join the nearest centroid.
// It ends with means, so each centroid is the mean of its points. Points of weight 0 move no mean; they join the
// nearest centroid at the end. All sums are over points in their order in the cell.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "random.h"

namespace rowwise_hashing {

// Aligned memory that is reused from cell to cell, and grows when a cell needs more.
template <class T>
class Room {
 public:
  T* of(int64_t count) {
    if (count > count_) {
      held_.reset();
      held_.reset(static_cast<T*>(::operator new[](size_t(count) * sizeof(T), AT)));
      count_ = count;
    }
    return held_.get();
  }

 private:
  static constexpr std::align_val_t AT{64};
  struct Free {
    void operator()(T* held) const { ::operator delete[](held, AT); }
  };
  std::unique_ptr<T, Free> held_;
  int64_t count_ = 0;
};

class CellWork {
 public:
  CellWork(const Kernels& kernels, const Points& points, const How& how)
      : kernels_(kernels), points_(points), how_(how), dims_(points.dims) {}

  void run(const Cell& cell, int64_t& used, const Out& out) {
    gather(cell);
    double least = std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < how_.tries; ++t) {
      key_ = mixed(key_ + uint64_t(t));
      seed(std::min(MOST_TRIED, 2 + int64_t(std::log(double(k_)))), nullptr);
      lloyd();
      if (how_.tries == 1) break;
      const double left = error();
      if (left < least) least = left, kept_.assign(label_, label_ + n_);
    }
    if (how_.tries > 1) {
      std::copy(kept_.begin(), kept_.end(), label_);
      means();
    }
    for (int pass = 0; pass < CAPPED && above_cap(); ++pass) {  // the first pass moves the means that the second uses
      fit_cap();
      means();
    }
    place_weightless();
    used = write(cell, out);
  }

  // Estimates the decrease of a cell's error by each further cluster.
  void drops(const Cell& cell, double* out) {
    gather(cell);
    std::fill(out, out + k_, 0.0);
    seed(2, out);
    for (int64_t k = 0; k < k_ && !weightless_; ++k) out[k] *= most_;
    if (weightless_) std::fill(out, out + k_, 0.0);
  }

 private:
  static constexpr int CAPPED = 2;

  // Coordinate 0 of a point in its block; the next one is BLOCK on.
  const float* at(int64_t i) const { return x_ + i / BLOCK * BLOCK * dims_ + i % BLOCK; }

  void gather(const Cell& cell) {
    n_ = cell.end - cell.begin, k_ = cell.clusters;
    key_ = mixed(how_.seed ^ mixed(uint64_t(cell.begin) << 24 ^ uint64_t(k_)));
    blocks_ = (n_ + BLOCK - 1) / BLOCK;
    const int64_t padded = blocks_ * BLOCK;
    x_ = x_room_.of(padded * dims_), w_ = w_room_.of(padded), best_ = best_room_.of(padded);
    label_ = label_room_.of(padded), centroid_ = centroid_room_.of(k_ * dims_), sums_ = sums_room_.of(blocks_);
    mass_.assign(size_t(n_), 0), weight_.assign(size_t(k_), 0), count_.assign(size_t(k_), 0);
    const int32_t* order = points_.order + cell.begin;
    std::fill(x_, x_ + padded * dims_, 0.0f);
    std::fill(w_, w_ + padded, 0.0f);
    double& most = most_ = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const float* x = points_.x + int64_t(order[i]) * dims_;
      float* to = const_cast<float*>(at(i));
      for (int64_t d = 0; d < dims_; ++d) to[d * BLOCK] = float(double(x[d]) * points_.scale);
      mass_[size_t(i)] = points_.w[order[i]] + points_.even;
      most = std::max(most, mass_[size_t(i)]);
    }
    weightless_ = most == 0;  // then all count the same
    if (weightless_) std::fill(mass_.begin(), mass_.end(), most = 1);
    for (int64_t i = 0; i < n_; ++i) w_[i] = float(mass_[size_t(i)] / most);
  }

  // The first point at which the running sum of `of` passes `target`; known sums of blocks skip whole blocks.
  template <class Of>
  int64_t drawn(double target, Of of) const {
    int64_t b = 0, last = 0;
    for (; b < blocks_ - 1 && target >= sums_[b]; ++b) target -= sums_[b];
    last = b * BLOCK;
    for (int64_t i = b * BLOCK; i < std::min(n_, (b + 1) * BLOCK); ++i) {
      const double mine = of(i);
      if (mine > 0) last = i;
      if (mine > 0 && target < mine) return i;
      target -= mine;
    }
    return last;  // rounding
  }

  int64_t drawn_by_weight(uint64_t number) {
    for (int64_t b = 0; b < blocks_; ++b) {
      sums_[b] = 0;
      for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; ++i) sums_[b] += double(w_[i]);
    }
    return drawn(share(key_, number) * total(), [this](int64_t i) { return double(w_[i]); });
  }

  double total() const {
    double all = 0;
    for (int64_t b = 0; b < blocks_; ++b) all += sums_[b];
    return all;
  }

  void put(float* to, int64_t i) const {
    for (int64_t d = 0; d < dims_; ++d) to[d] = at(i)[d * BLOCK];
  }

  void join(int64_t k) {
    kernels_.join(x_, blocks_, dims_, centroid_ + k * dims_, int32_t(k), w_, best_, label_, sums_);
  }

  // Draws seeds; `drops`, unless null, gets the decrease of the error by each.
  void seed(int64_t tried, double* drops) {
    std::vector<float> candidates(size_t(tried * dims_));
    double left[MOST_TRIED];
    std::fill(best_, best_ + blocks_ * BLOCK, std::numeric_limits<float>::max());
    std::fill(label_, label_ + blocks_ * BLOCK, 0);
    put(centroid_, drawn_by_weight(0));
    join(0);
    for (int64_t k = 1; k < k_; ++k) {
      const double all = total();
      const uint64_t number = uint64_t(k) * MOST_TRIED;
      if (!(all > 0)) {  // every point with a weight is a seed: repeat some, as equal points may be too heavy for one
        put(centroid_ + k * dims_, drawn_by_weight(number));
        join(k);
        continue;
      }
      for (int64_t t = 0; t < tried; ++t)
        put(&candidates[size_t(t * dims_)],
            drawn(share(key_, number + uint64_t(t)) * all, [this](int64_t i) { return double(w_[i] * best_[i]); }));
      kernels_.weigh(x_, blocks_, dims_, candidates.data(), tried, w_, best_, left);
      const float* chosen = &candidates[size_t((std::min_element(left, left + tried) - left) * dims_)];
      std::copy(chosen, chosen + dims_, centroid_ + k * dims_);
      join(k);
      if (drops) drops[k] = all - total();
    }
  }

  void lloyd() {
    means();
    for (int64_t round = 1; round < how_.rounds && k_ > 1; ++round)
      if (!reassign() & !means()) break;
  }

  double error() const {
    double left = 0;
    for (int64_t i = 0; i < n_; ++i) left += double(w_[i] * best_[i]);
    return left;
  }

  // Moves each centroid to the mean of its points; returns whether an empty cluster took a point far from its own.
  bool means() {
    add_up();
    const bool moved = fill_empty();
    if (moved) add_up();
    for (int64_t k = 0; k < k_; ++k)
      for (int64_t d = 0; d < dims_ && weight_[size_t(k)] > 0; ++d)
        centroid_[k * dims_ + d] = float(sum_[size_t(k * dims_ + d)] / weight_[size_t(k)]);
    return moved;
  }

  void add_up() {
    sum_.assign(size_t(k_ * dims_), 0);
    std::fill(weight_.begin(), weight_.end(), 0);
    std::fill(count_.begin(), count_.end(), 0);
    for (int64_t i = 0; i < n_; ++i) {
      const int32_t k = label_[i];
      if (k < 0) continue;
      const double w = mass_[size_t(i)];
      weight_[size_t(k)] += w;
      count_[size_t(k)] += w > 0;
      double* to = &sum_[size_t(k * dims_)];
      const float* x = at(i);
      for (int64_t d = 0; d < dims_; ++d) to[d] += w * double(x[d * BLOCK]);
    }
  }

  bool fill_empty() {
    std::vector<int32_t> empty;
    for (int64_t k = 0; k < k_; ++k)
      if (count_[size_t(k)] == 0) empty.push_back(int32_t(k));
    if (empty.empty()) return false;
    std::vector<int64_t> worst;
    for (int64_t i = 0; i < n_; ++i)
      if (label_[i] >= 0 && w_[i] * best_[i] > 0) worst.push_back(i);
    std::sort(worst.begin(), worst.end(), [this](int64_t a, int64_t b) {
      const float left = w_[a] * best_[a], right = w_[b] * best_[b];
      return left != right ? left > right : a < b;
    });
    size_t filled = 0;
    for (int64_t i : worst) {
      if (filled == empty.size()) break;
      int32_t& label = label_[i];
      if (count_[size_t(label)] < 2) continue;
      --count_[size_t(label)];
      label = empty[filled++];
      best_[i] = 0;
    }
    return filled > 0;
  }

  bool reassign() {
    int32_t* found = found_room_.of(blocks_ * BLOCK);
    kernels_.nearest(x_, blocks_, dims_, centroid_, k_, best_, found);
    const bool moved = !std::equal(found, found + n_, label_);
    std::copy(found, found + blocks_ * BLOCK, label_);
    return moved;
  }

  bool above_cap() const {
    for (int64_t k = 0; k < k_; ++k)
      if (weight_[size_t(k)] > how_.cap && count_[size_t(k)] > 1) return !weightless_;
    return false;
  }

  // Assigns points by falling weight, equal ones by rising distance, each to the nearest cluster with room. A point
  // gets none only if it would lift every cluster above the cap.
  void fit_cap() {
    reassign();
    std::vector<int64_t> order;
    for (int64_t i = 0; i < n_; ++i)
      if (mass_[size_t(i)] > 0) order.push_back(i);
    std::sort(order.begin(), order.end(), [this](int64_t a, int64_t b) {
      const double left = mass_[size_t(a)], right = mass_[size_t(b)];
      if (left != right) return left > right;
      return best_[a] != best_[b] ? best_[a] < best_[b] : a < b;
    });
    std::vector<double> load(size_t(k_), 0);
    for (int64_t i : order) {
      const double w = mass_[size_t(i)];
      if (!has_room(load[size_t(label_[i])], w)) label_[i] = nearest_with_room(i, load);
      if (label_[i] >= 0) load[size_t(label_[i])] += w;
    }
  }

  bool has_room(double load, double w) const { return load == 0 || load + w <= how_.cap; }

  int32_t nearest_with_room(int64_t i, const std::vector<double>& load) const {
    int32_t found = -1;
    float best = std::numeric_limits<float>::infinity();
    for (int64_t k = 0; k < k_; ++k) {
      if (!has_room(load[size_t(k)], mass_[size_t(i)])) continue;
      float far = 0;
      for (int64_t d = 0; d < dims_; ++d) {
        const float away = at(i)[d * BLOCK] - centroid_[k * dims_ + d];
        far += away * away;
      }
      if (far < best) best = far, found = int32_t(k);
    }
    return found;
  }

  void place_weightless() {
    if (weightless_ || k_ == 1 || std::find(mass_.begin(), mass_.end(), 0.0) == mass_.end()) return;
    int32_t* found = found_room_.of(blocks_ * BLOCK);
    kernels_.nearest(x_, blocks_, dims_, centroid_, k_, best_, found);
    for (int64_t i = 0; i < n_; ++i)
      if (mass_[size_t(i)] == 0) label_[i] = found[i];
  }

  // Writes the clusters that have points, numbered without gaps.
  int64_t write(const Cell& cell, const Out& out) {
    std::vector<int32_t> number(size_t(k_), -1);
    for (int64_t i = 0; i < n_; ++i)
      if (label_[i] >= 0) number[size_t(label_[i])] = 0;
    int32_t used = 0;
    for (int64_t k = 0; k < k_; ++k) {
      if (number[size_t(k)] < 0) continue;
      const int64_t to = cell.base + used;
      for (int64_t d = 0; d < dims_; ++d)
        out.centroid[to * dims_ + d] = float(double(centroid_[k * dims_ + d]) / points_.scale);
      out.weight[to] = weightless_ ? 0 : weight_[size_t(k)];
      number[size_t(k)] = used++;
    }
    for (int64_t i = 0; out.label && i < n_; ++i)
      out.label[points_.order[cell.begin + i]] = label_[i] < 0 ? -1 : int32_t(cell.base) + number[size_t(label_[i])];
    return used;
  }

  const Kernels& kernels_;
  const Points& points_;
  const How& how_;
  const int64_t dims_;
  int64_t n_ = 0, k_ = 0, blocks_ = 0;
  uint64_t key_ = 0;
  double most_ = 0;  // the largest weight, by which `w_` is divided
  bool weightless_ = false;
  float *x_ = nullptr, *w_ = nullptr, *best_ = nullptr, *centroid_ = nullptr;
  int32_t* label_ = nullptr;
  double* sums_ = nullptr;
  Room<float> x_room_, w_room_, best_room_, centroid_room_;
  Room<int32_t> label_room_, found_room_;
  std::vector<int32_t> kept_;
  Room<double> sums_room_;
  std::vector<double> mass_, weight_, sum_;  // of points; of clusters
  std::vector<int32_t> count_;               // points with a weight
};

}  // namespace rowwise_hashing
