// The interface of the library: plain functions, which Python calls through ctypes (tables/store/shared_cache.py).
//
// A cache of rows in memory that processes share. Each copies rows out of it and into it; none waits for another.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct SharedCacheShape {
  int64_t slots;      // a multiple of 32
  int64_t row_bytes;  // of all rows
  int64_t keys;       // keys from 0 to this one have counts of their own
  int64_t lfu;        // else LRU
};

struct CachedFeature {
  int64_t source;  // index of the feature in the batch
  int64_t key;     // of row 0 of its table; that of row r is larger by r
  int64_t table;   // places of rows of a table begin with 0
  char* memory;    // of the table's rows in this process
};

struct MissingRow {
  int64_t key;
  char* to;              // where the row has to go
  int64_t table, place;  // the same as a place of a table
};

int64_t shared_cache_bytes(const SharedCacheShape* shape);
// `memory`: zeroed before the first process opens it. nullptr: there is no memory for the map of a batch.
void* shared_cache_open(char* memory, const SharedCacheShape* shape);
void shared_cache_close(void* cache);

// Replaces the rows of a batch by places in the memory of their table, and copies the rows there that the cache has.
// Returns the number of missing rows, or -1 if there is no memory for the map of the batch. `distinct`: of all rows.
int64_t shared_cache_take(void* cache, int64_t tag, int64_t count, const CachedFeature* features,
                          const int64_t* offsets, int64_t batch, int64_t* values, int64_t* distinct);
const MissingRow* shared_cache_missing(void* cache);  // of the last call of `shared_cache_take`

// Copies rows to their places, and into the cache.
void shared_cache_put(void* cache, int64_t tag, int64_t count, const MissingRow* missing, const char* rows);
// Fills the cache with rows and their counts of accesses; the last ones are evicted last.
void shared_cache_warm(void* cache, int64_t tag, int64_t count, const int64_t* keys, const char* rows,
                       const int64_t* counts);

// Reads rows from places in a file; reads that miss the page cache run in parallel. Returns 0 or errno.
int32_t read_rows(int32_t file, int64_t count, const int64_t* begins, int64_t row_bytes, char* rows);
}
#pragma GCC visibility pop
