// What crosses between Python, the clustering and its inner loops, which are compiled for each instruction set.
//
// Points lie in blocks of BLOCK, each as [dims][BLOCK], so that neighbours in memory are the same coordinate of
// different points. Each point is worked on alone, in an order that no width of vectors changes: results are the same
// bits on every processor.
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
  double even;           // what is added to each weight
  const int32_t* order;  // which points there are: cells are ranges of it
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
  int64_t tries;  // of which the best is kept
  double cap;     // infinite: none
};

// Where the clusters go. Labels are by point; none: only the clusters are wanted. -1: no cluster had room.
struct Out {
  int32_t* label;
  float* centroid;
  double* weight;
  int64_t* used;  // of each cell: how many clusters it has
};

// What a range of points is like.
struct Survey {
  double weight;
  double spread;        // weighted squares of distances from the mean
  double heavy_weight;  // of the points above the cap
  int64_t heavy;        // how many these are
  int64_t distinct;
};

struct Kernels {
  const char* name;
  // The nearest of `count` centroids, the first of equals, and the square of its distance.
  void (*nearest)(const float* x, int64_t blocks, int64_t dims, const float* centroids, int64_t count, float* best,
                  int32_t* at);
  // Points that are nearer to this centroid than to their own become its. `sums`: weights times squares, by block.
  void (*join)(const float* x, int64_t blocks, int64_t dims, const float* centroid, int32_t number, const float* w,
               float* best, int32_t* at, double* sums);
  // What the sum of weights times squares would be if one of these centroids were added.
  void (*weigh)(const float* x, int64_t blocks, int64_t dims, const float* centroids, int64_t count, const float* w,
                const float* best, double* totals);
};

}  // namespace rowwise_hashing
