// The ABI between Python and the kernels, and the kernel table of one instruction set.
//
// Plain C structures: the library is loaded without torch, by worker processes.
#pragma once
#include <cstdint>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "ids and text are read as little-endian words");

namespace rowwise_ingest {

enum Kind : int64_t { I8, I16, I32, I64, U8, U16, U32 };  // type of ids; uint64 is passed as I64, bit for bit

// Ids in Arrow's layout: row r has values offsets[r] - base up to offsets[r + 1] - base, or just value r.
struct Ids {
  const void* values;
  int64_t kind;
  int64_t count;  // number of values
  const void* offsets;
  int64_t offset_bytes;  // 4, 8, or 0: one value a row
  int64_t base;
  const uint8_t* row_valid;  // bit row_bit + r; null if all rows are valid
  int64_t row_bit;
  const uint8_t* id_valid;  // bit id_bit + i; null if all ids are valid
  int64_t id_bit;
  const int64_t* order;  // row numbers in output order; null for the identity
  int64_t rows;          // output rows
  int64_t first;         // maximum ids per row
};

enum What : int64_t { AS_IS, CHECK, REMAINDER, HASH, SIGRID };

// The mapping of ids. Division by `rows` is multiplication by `multiplier` and a shift, see hash.h.
struct Make {
  int64_t what;
  uint64_t rows;
  uint64_t salt;
  uint64_t multiplier;
  int64_t shift;
};

// A column of numbers; missing values and NaN are replaced by the fill.
struct Numbers {
  const float* x;
  const uint8_t* valid;
  int64_t bit;
  float fill;
};

struct Kernels {
  const char* name;
  // The number of output ids; -1 if offsets descend or lie outside the values, and then `bags` must not be called.
  int64_t (*count)(const Ids&);
  // Writes `total` ids (from `count`) to `out` of capacity `room`; returns 1 if CHECK found an id out of range.
  int64_t (*bags)(const Ids&, const Make&, int64_t* out, int64_t* offsets, int64_t total, int64_t room);
  int64_t (*map)(const int64_t* in, int64_t* out, int64_t count, const Make&);  // 1 if CHECK found an id out of range
  void (*text)(const uint8_t* data, const int64_t* offsets, int64_t count, int64_t bytes, uint64_t* out);
  void (*buckets32)(const float* x, int64_t count, const float* borders, int64_t half, int64_t most, int64_t* out);
  void (*buckets64)(const double* x, int64_t count, const double* borders, int64_t half, int64_t most, int64_t* out);
  int64_t (*fill)(const Numbers*, int64_t columns, const int64_t* order, int64_t begin, int64_t rows, float* out);
  void (*turn)(const float* columns, int64_t count, int64_t rows, float* out);
};

}  // namespace rowwise_ingest
