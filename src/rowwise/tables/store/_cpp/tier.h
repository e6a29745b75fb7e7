// The interface of the library: plain structs and functions, which Python calls through ctypes
// (tables/store/native.py).
//
// A tier holds the rows and the optimizer state of table pieces: all of them in a log on disk, some of them in the
// slots of a cache in memory, which the kernels of `ops` read and change.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum TierCode : int32_t {
  TIER_OK = 0,
  TIER_BAD_ID = 1,     // an id is outside its table; nothing has changed
  TIER_TOO_SMALL = 2,  // a batch has more distinct rows of a table than its cache can hold at once
  TIER_DAMAGED = 3,    // a record on disk does not match its checksum
  TIER_IO = 4,         // the system refused to read or write: `error` is its number
  TIER_LOG_FULL = 5,   // more records than locations have bits for
  TIER_MEMORY = 6,     // memory for the cache's tags or the index could not be allocated
  TIER_FORKED = 7,     // the process is a fork of the one whose threads read and write
};

struct TierStatus {
  int32_t code, error;  // error: errno of TIER_IO
  int32_t table;
  int64_t row;       // of TIER_DAMAGED
  int64_t distinct;  // of TIER_TOO_SMALL: slots of the table, those of its overflow included
};

struct TierTable {
  int64_t rows;
  int64_t row_bytes, state_bytes;
  int64_t slots;     // of the sets: a multiple of 32
  int64_t overflow;  // the last slots, for rows whose set is full of rows of the same batch
  int64_t policy;    // 0: LRU, 1: LFU
  char* row_memory;  // of slots + pinned + overflow rows
  char* state_memory;
  int64_t* slot_rows;          // the row in each slot, -1: none
  const int64_t* pinned_rows;  // ascending: rows whose slots, behind those of the sets, no other row takes
  int64_t pinned;
};

struct TierSegment {  // the ids of one feature
  int64_t table;
  int64_t wide;  // int64, else int32
  const void* ids;
  int64_t count;
  void* slots;  // where the slots go, in the type of the ids
};

enum TierCounter : int32_t { HITS, MISSES, NEW_ROWS, EVICTIONS, WRITES, TIER_COUNTERS };
enum TierIo : int32_t { IO_READS, IO_READ_BYTES, IO_WRITTEN_BYTES, IO_READ_WAIT_S, IO_WRITE_WAIT_S, IO_BUSY_S };

// `path`: a folder. The log is a file without a name: the system frees it when the process ends, however it ends.
void* tier_open(const char* path, int64_t segment_bytes, int32_t use_uring, int64_t count, const TierTable* tables,
                TierStatus* status);
void tier_close(void* tier);

// Puts the rows of a batch into slots. Rows that were never written are listed by `tier_new_rows`: their slots have to
// be filled before the kernels run. `changes`: the kernels will change the rows. `counts`: accesses count for the
// policy and the counters.
void tier_pin(void* tier, int64_t count, const TierSegment* segments, int32_t changes, int32_t counts,
              TierStatus* status);
int64_t tier_new_rows(void* tier, int64_t table, int64_t* rows, int64_t* slots);  // of the last pin; their number
// Prefetches the rows of one of the next batches, in a thread; `slots` are not used.
void tier_read_ahead(void* tier, int64_t count, const TierSegment* segments, TierStatus* status);
void tier_unpin(void* tier, TierStatus* status);

// Rows by number, with their state. `found`: 0 for a row that was never written, which is left to the caller.
void tier_read(void* tier, int64_t table, const int64_t* rows, int64_t count, char* row_out, char* state_out,
               uint8_t* found, TierStatus* status);
void tier_write(void* tier, int64_t table, const int64_t* rows, int64_t count, const char* row_in, const char* state_in,
                TierStatus* status);
void tier_flush(void* tier, TierStatus* status);  // writes changed slots to the log
int64_t tier_written(void* tier, int64_t table, int64_t first, int64_t last, int64_t* rows);  // rows in the log
void tier_forget(void* tier, int64_t table);  // resets all rows to never written
void tier_counters(void* tier, int64_t table, int64_t* values);
void tier_io(void* tier, double* values);  // counts and seconds of all tables, by TierIo
// The intervals, by CLOCK_MONOTONIC, in which rows were read and that end after `since_s`.
int64_t tier_busy(void* tier, double since_s, int64_t most, double* begins, double* ends);
int64_t tier_disk_bytes(void* tier);
int32_t tier_is_direct(void* tier);
int32_t tier_uses_uring(void* tier);
int32_t tier_file(void* tier);  // the descriptor of the log
}
#pragma GCC visibility pop
