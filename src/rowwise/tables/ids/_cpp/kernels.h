// The structs that Python, the clustering and its inner loops share; the loops are compiled for each instruction set.
//
// Points lie in blocks of BLOCK, each as [dims][BLOCK], so that neighbours in memory are the same coordinate of
// different points. Each point is computed by itself, in an order that does not depend on the width of vectors, so
// results are the same bits on every processor.
#pragma once
#include <cstdint>

namespace rowwise_hashing {

constexpr int64_t LANES = 16, VECTORS = 4, BLOCK = LANES * VECTORS;
constexpr int64_t MOST_TRIED = 16;  // candidates for a seed

struct Points {
  const float* x;   // [points][dims]
  const double* w;  // [points], at least 0
  int64_t dims;
  double scale;          // a power of two that makes the largest coordinate about 1
  double even;           // a number that is added to each weight
  const int32_t* order;  // indices of the points to cluster: cells are ranges of it
};

// A range of points that become `clusters` clusters, numbered from `base` on.
struct Cell {
  int64_t begin, end;
  int64_t clusters;
  int64_t base;
};

struct How {
  uint64_t seed;
  int64_t rounds;
  int64_t tries;  // repeats with other seeds, of which the best is used
  double cap;     // the largest weight of a cluster; infinite: none
};

// Output arrays. A label is -1 if no cluster had room for the point. `label` may be null.
struct Out {
  int32_t* label;
  float* centroid;
  double* weight;
  int64_t* used;  // the number of clusters of each cell
};

// Statistics of a range of points.
struct Survey {
  double weight;
  double spread;        // weighted squares of distances from the mean
  double heavy_weight;  // total weight of the points above the cap
  int64_t heavy;        // their number
  int64_t distinct;
};

struct Kernels {
  const char* name;
  // The nearest of `count` centroids, the first of equals, and the square of its distance.
  void (*nearest)(const float* x, int64_t blocks, int64_t dims, const float* centroids, int64_t count, float* best,
                  int32_t* at);
  // Labels points that are nearer to this centroid than to their own. `sums`: weights times squares, by block.
  void (*join)(const float* x, int64_t blocks, int64_t dims, const float* centroid, int32_t number, const float* w,
               float* best, int32_t* at, double* sums);
  // For each of these centroids, the sum of weights times squares after it is added.
  void (*weigh)(const float* x, int64_t blocks, int64_t dims, const float* centroids, int64_t count, const float* w,
                const float* best, double* totals);
};

}  // namespace rowwise_hashing
