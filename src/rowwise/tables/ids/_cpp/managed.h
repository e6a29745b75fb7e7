// The map from ids to rows of a managed table, or of a piece of one: whole buckets of rows, each with its own ids.
//
// The arrays of a map (id, used, count; candidate, seen) belong to the caller and are the whole state: the index, the
// free rows and the orders of eviction are rebuilt from them. See [Note: Managed tables] in ids/managed/piece.py.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct ManagedSettings {
  int64_t rows;          // of the piece: a multiple of bucket_rows
  int64_t bucket_rows;   // rows of a bucket
  int64_t bucket_bits;   // of the hash, which number the table's buckets
  int64_t first_bucket;  // of the piece
  int64_t least_used;    // 1: evict the least frequently used row; 0: the least recently used
  int64_t admit;         // occurrences after which an id is admitted
  uint64_t threshold;    // an id is admitted if a hash of it and the step is below; the largest number: always
  uint64_t seed;
  int64_t ttl;  // steps without use after which an id is removed; 0: never
};

struct ManagedRows {
  int64_t* id;         // -1: none
  int64_t* used;       // step of the last use
  int64_t* count;      // occurrences since the id was admitted
  int64_t* candidate;  // ids that wait for admission; null if admit is 1
  int64_t* seen;       // their occurrences
};

enum { MANAGED_OK, MANAGED_MEMORY };
enum { MANAGED_RESET, MANAGED_CHANGED, MANAGED_EVICTED };  // lists of a call
enum { MANAGED_COUNTERS = 6 };  // rows in use, admitted, evicted, rejected, overflowed, expired

void* managed_open(const ManagedSettings* settings, const ManagedRows* rows);  // null: no memory
void managed_close(void* map);
// The rows of ids in the piece; row 0 of its bucket for an id without one.
void managed_find(const void* map, const int64_t* ids, int64_t n, int64_t* rows);
// Counts occurrences of ids in a step, admits new ids and evicts old ones.
int32_t managed_observe(void* map, const int64_t* ids, const int64_t* counts, int64_t n, int64_t step);
// The length of a list of the last `managed_observe`: rows to reset, rows whose state changed, evicted ids; copies it
// unless `out` is null.
int64_t managed_list(const void* map, int32_t which, int64_t* out);
void managed_counters(const void* map, int64_t* out);
void managed_buckets(const int64_t* ids, int64_t n, int64_t bucket_bits, int64_t* buckets);
}
#pragma GCC visibility pop
