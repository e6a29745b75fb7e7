// The kernels of one instruction set as a table of functions, and the arguments of an update.
//
// Range versions: the caller owns the threads (bind.cpp, update.cpp).
#pragma once
#include "idmap.h"
#include "tables.h"

namespace rowwise {

// Where a contribution finds its gradient. Plain: contribution c is the gradient at grad + c * stride and
// belongs to sample c / features. Listed: c indexes the three arrays.
struct Source {
  const float* grad;
  int64_t stride;
  int64_t features;
  bool in_cache;          // gradients are near: not worth prefetching
  const int64_t* place;   // listed: offset of the gradient from grad; nullptr: plain
  const float* scale;     // listed
  const int32_t* sample;  // listed
};

// Contributions of one bucket of rows of one table, ordered by (row, contribution).
struct Bucket {
  const uint64_t* entries;  // row << payload_bits | contribution
  int64_t num_entries;
  int payload_bits;
  Table table;
  Hyper hyper;
  uint64_t key;  // of this step's random numbers
  Source source;
  char* arena;
  float* state;
  const int64_t* slot_rows;  // nullptr: slots are rows
  int64_t full_row(int64_t slot) const { return table.first_row + (slot_rows ? slot_rows[slot] : slot); }
};

struct Workspace {  // one a thread
  int64_t* starts;  // segment starts, num_entries + 1 of them
  float* merged;    // gradients of up to batch_rows rows
  int64_t stride;   // floats from one to the next, whole vectors
  float* floats;    // their weights, where a row is only stored when all of it is known
  float* tree;      // tree_levels rows of eight vectors
};
constexpr int64_t batch_rows = 8;
constexpr int tree_levels = 56;
constexpr int tree_row = 128;  // floats: eight of the widest vectors

// The distinct ids of a batch as a bitmap: bit i of word w is id least + 64 * w + i.
struct Marks {
  const uint64_t* bits;
  const uint32_t* before;  // for each word: bits that are set in the words before it
  int64_t least;
  int64_t first;  // the rank of the first distinct id
};

// The row ranges of one feature, and the precomputed data of the search for an id's range.
struct Ranges {
  const int64_t* bounds;  // buckets + 1 of them
  int64_t buckets;
  const int64_t* padded;  // the bounds between ranges, and the largest number up to 2 * half - 1 of them
  int64_t half;
  uint64_t multiplier;  // ranges of one size: an id's is (id * multiplier >> 64) >> shift; 0: of several sizes
  int shift;
};

// Vectors of each sample whose pairs are multiplied: a dense one, and those of the features side by side.
struct Interaction {
  const float* dense;   // [B, dim]
  const float* pooled;  // [B, features * dim]
  int64_t dim;
  int64_t features;
  int64_t stride;  // vectors of a sample, up to whole vectors of lanes: rows of scratch
};
struct InteractionGrad {
  float* dense;
  float* pooled;
  bool stream;
};
// One vector, and rows that it is multiplied with.
struct Dots {
  const float* query;  // [dim]
  const float* rows;   // [.., dim]
  int64_t dim;
  const int64_t* places;  // numbers of the rows; nullptr: all, in their order
};
// A linear layer, maybe with a ReLU. Its weights: for each `panel` outputs a line of biases, then one for each input.
struct Layer {
  const float* weights;
  int64_t in;
  int64_t out;
  bool relu;
};
constexpr int64_t panel = 16;
constexpr int64_t widest_lanes = 16;  // of any instruction set; scratch is padded to it

struct OptimizerFacts {
  const char* name;                      // nullptr: there is no such optimizer
  int64_t (*state_floats)(int64_t dim);  // of each row, at least
};

struct Kernels {
  const char* name;
  void (*pool)(const char* arena, const Feature&, const Bags&, float* out, int64_t out_stride, int64_t b0, int64_t b1,
               bool stream, Fault&);
  void (*gather)(const char* arena, const Feature&, const Bags&, float* out, int64_t i0, int64_t i1, Fault&);
  void (*weight_grad)(const char* arena, const Feature&, const Bags&, const float* grad, int64_t grad_stride,
                      int64_t b0, int64_t b1, float* out, Fault&);
  float (*touch)(const char* arena, const Feature&, const Bags&, int64_t i0, int64_t i1);
  void (*rewrite)(char* arena, const Feature&, const Bags&, int64_t i0, int64_t i1);  // threads: ids apart
  void (*uniform)(float* out, int64_t n, uint64_t key, uint64_t start, float low, float span);
  void (*pack)(const Format&, const float* in, char* out, int64_t rows);    // to the nearest; int8 only
  void (*unpack)(const Format&, const char* in, float* out, int64_t rows);  // any format
  void (*pack4)(const float* in, int64_t dim, char* out, int64_t rows);
  void (*unpack4)(const char* in, int64_t dim, float* out, int64_t rows);
  void (*keep_largest)(const float* in, int64_t dim, int64_t kept, char* out, int64_t rows);  // dim <= 256
  void (*apply)(const Bucket&, const Workspace&, Fault&);  // Fault: row whose merged gradient is not finite
  OptimizerFacts (*optimizer)(int64_t rule);
  void (*span)(const void* ids, bool wide, int64_t n, int64_t& least, int64_t& largest);   // n > 0
  void (*rank)(const void* ids, bool wide, int64_t n, const Marks&, int64_t* out);         // all ids are marked
  bool (*route)(const void* ids, bool wide, int64_t n, const Ranges&, uint16_t* buckets);  // false: ids in no range
  void (*stream_copy)(void* out, const void* in, int64_t bytes);
  // scratch: dim * stride floats, the pairs of a sample and one more vector of lanes
  void (*interact)(const Interaction&, float* out, int64_t b0, int64_t b1, float* scratch);
  void (*interact_grad)(const Interaction&, const float* grad, const InteractionGrad&, int64_t b0, int64_t b1);
  // scratch: dim floats
  void (*pair_sums)(const Interaction&, float* out, int64_t b0, int64_t b1, float* scratch);
  void (*pair_sums_grad)(const Interaction&, const float* grad, const InteractionGrad&, int64_t b0, int64_t b1);
  void (*dots)(const Dots&, float* out, int64_t i0, int64_t i1);
  void (*layer)(const Layer&, const float* in, float* out, int64_t rows);
  void (*map_ids)(const void* ids, bool wide, int64_t n, const IdMap&, int64_t* out);  // out [n, columns]; all checked
};

namespace base {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace rowwise
