// What crosses between Python and the kernels, and the kernels of one instruction set.
//
// Plain structures and numbers: the library is loaded without torch, by processes that only make batches.
#pragma once
#include <cstdint>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "ids and text are read as little-endian words");

namespace rowwise_ingest {

enum Kind : int64_t { I8, I16, I32, I64, U8, U16, U32 };  // of ids; unsigned ones of 64 bits are I64, bit for bit

// Ids as Arrow holds them: row r has those at offsets[r] - base up to offsets[r + 1] - base, or just the one at r.
struct Ids {
  const void* values;
  int64_t kind;
  int64_t count;  // of values
  const void* offsets;
  int64_t offset_bytes;  // 4, 8, or 0: one value a row
  int64_t base;
  const uint8_t* row_valid;  // bit row_bit + r; none: all are
  int64_t row_bit;
  const uint8_t* id_valid;  // bit id_bit + i
  int64_t id_bit;
  const int64_t* order;  // which row comes first, second and so on; none: as they are
  int64_t rows;          // that come
  int64_t first;         // ids of each row that are used, at most
};

enum What : int64_t { AS_IS, CHECK, REMAINDER, HASH, SIGRID };

// What becomes of each id. Division by `rows` is multiplication by `multiplier` and a shift, see hash.h.
struct Make {
  int64_t what;
  uint64_t rows;
  uint64_t salt;
  uint64_t multiplier;
  int64_t shift;
};

// A column of numbers; where valid has no bit, and for NaN, comes the fill.
struct Numbers {
  const float* x;
  const uint8_t* valid;
  int64_t bit;
  float fill;
};

struct Kernels {
  const char* name;
  // How many ids there will be; -1: of offsets that fall or lie outside the values, and then nothing may be filled.
  int64_t (*count)(const Ids&);
  // The ids, `total` of them as counted, where there is room for `room`; 1: one was outside, as `make` was to check.
  int64_t (*bags)(const Ids&, const Make&, int64_t* out, int64_t* offsets, int64_t total, int64_t room);
  int64_t (*map)(const int64_t* in, int64_t* out, int64_t count, const Make&);  // 1: an id outside was met
  void (*text)(const uint8_t* data, const int64_t* offsets, int64_t count, int64_t bytes, uint64_t* out);
  void (*buckets32)(const float* x, int64_t count, const float* borders, int64_t half, int64_t most, int64_t* out);
  void (*buckets64)(const double* x, int64_t count, const double* borders, int64_t half, int64_t most, int64_t* out);
  int64_t (*fill)(const Numbers*, int64_t columns, const int64_t* order, int64_t begin, int64_t rows, float* out);
  void (*turn)(const float* columns, int64_t count, int64_t rows, float* out);
};

}  // namespace rowwise_ingest
