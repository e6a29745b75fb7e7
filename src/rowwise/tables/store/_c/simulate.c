// Caches of rows run over a trace: tables/store/simulate.py defines them. Plain C, no tensors, no globals.
//
// Rows are numbered 0, 1, ...; the native cache of training searches tags, while this knows the place of each row.

#include <stdint.h>
#include <stdlib.h>

enum { WAYS = 32, NOWHERE = -1 };

typedef struct {
  const int32_t* row;  // accesses
  int64_t accesses, rows;
  const int64_t* batch_end;  // batches
  int64_t batches, skip;     // the first `skip` accesses are not counted
} Trace;

typedef struct {
  int64_t hits, misses, evictions, overflows;
} Counts;

static void* filled(int64_t count, size_t size, int byte) {
  unsigned char* block = malloc((size_t)(count ? count : 1) * size);
  for (size_t i = 0; block && i < (size_t)count * size; ++i) block[i] = (unsigned char)byte;
  return block;
}

typedef struct {
  int32_t* row_at;    // slots
  uint32_t* stamp;    // slots
  int64_t* slot_of;   // rows
  int64_t* batch_of;  // rows: the last batch that accessed it
  int64_t* spilled;   // rows: the last batch that had it in the overflow
  uint16_t* count;    // rows
} Sets;

// The way that a missed row takes, or NOWHERE if this batch accessed all rows of the set.
static int64_t choose(const Sets* sets, int64_t first, int64_t batch, int lfu) {
  int64_t best = NOWHERE;
  for (int64_t slot = first; slot < first + WAYS; ++slot) {
    int32_t row = sets->row_at[slot];
    if (row == NOWHERE) return slot;
    if (sets->batch_of[row] == batch) continue;
    if (best != NOWHERE) {
      uint16_t count = lfu ? sets->count[row] : 0, least = lfu ? sets->count[sets->row_at[best]] : 0;
      if (count > least || (count == least && sets->stamp[slot] >= sets->stamp[best])) continue;
    }
    best = slot;
  }
  return best;
}

static void run_sets(const Trace* trace, const int64_t* set_of, int lfu, const Sets* sets, Counts* counts) {
  uint32_t clock = 0;
  int64_t at = 0;
  for (int64_t batch = 0; batch < trace->batches; ++batch) {
    for (; at < trace->batch_end[batch]; ++at) {
      int32_t row = trace->row[at];
      int counted = at >= trace->skip;
      ++clock;
      if (sets->count[row] < UINT16_MAX) ++sets->count[row];
      sets->batch_of[row] = batch;
      int64_t slot = sets->slot_of[row];
      if (slot != NOWHERE || sets->spilled[row] == batch) {
        counts->hits += counted;
      } else {
        counts->misses += counted;
        slot = choose(sets, set_of[row] * WAYS, batch, lfu);
        if (slot == NOWHERE) {
          sets->spilled[row] = batch;
          counts->overflows += counted;
        } else {
          if (sets->row_at[slot] != NOWHERE) {
            sets->slot_of[sets->row_at[slot]] = NOWHERE;
            counts->evictions += counted;
          }
          sets->row_at[slot] = row;
          sets->slot_of[row] = slot;
        }
      }
      if (slot != NOWHERE) sets->stamp[slot] = clock;
    }
  }
}

// Returns 0 if out of memory, as the other functions do.
int64_t rw_simulate_sets(const Trace* trace, const int64_t* set_of, int64_t sets, int64_t lfu, Counts* counts) {
  Sets all = {
      .row_at = filled(sets * WAYS, sizeof(int32_t), 0xff),
      .stamp = filled(sets * WAYS, sizeof(uint32_t), 0),
      .slot_of = filled(trace->rows, sizeof(int64_t), 0xff),
      .batch_of = filled(trace->rows, sizeof(int64_t), 0xff),
      .spilled = filled(trace->rows, sizeof(int64_t), 0xff),
      .count = filled(trace->rows, sizeof(uint16_t), 0),
  };
  int ok = all.row_at && all.stamp && all.slot_of && all.batch_of && all.spilled && all.count;
  if (ok) run_sets(trace, set_of, (int)lfu, &all, counts);
  free(all.row_at), free(all.stamp), free(all.slot_of), free(all.batch_of), free(all.spilled), free(all.count);
  return ok;
}

static void count_access(const Trace* trace, int64_t at, int hit, int evicts, Counts* counts) {
  if (at < trace->skip) return;
  counts->hits += hit;
  counts->misses += !hit;
  counts->evictions += evicts;
}

// Least recently used over all rows: a ring of rows from the last used to the first; `rows` stands for both ends.
int64_t rw_simulate_lru(const Trace* trace, int64_t capacity, Counts* counts) {
  int64_t end = trace->rows, used = 0;
  int64_t* next = filled(end + 1, sizeof(int64_t), 0xff);
  int64_t* last = filled(end + 1, sizeof(int64_t), 0xff);
  if (next && last) {
    next[end] = last[end] = end;
    for (int64_t at = 0; at < trace->accesses; ++at) {
      int64_t row = trace->row[at], hit = next[row] != NOWHERE, evicts = !hit && used == capacity;
      count_access(trace, at, (int)hit, (int)evicts, counts);
      used += !hit && !evicts;
      int64_t leaves = hit ? row : last[end];
      if (hit || evicts) {
        last[next[leaves]] = last[leaves];
        next[last[leaves]] = next[leaves];
        next[leaves] = last[leaves] = NOWHERE;
      }
      next[row] = next[end], last[row] = end;
      last[next[row]] = row, next[end] = row;
    }
  }
  int ok = next && last;
  free(next), free(last);
  return ok;
}

typedef struct {
  int64_t use, row;  // when a row is accessed next
} Entry;

static void push(Entry* heap, int64_t size, Entry entry) {
  int64_t at = size;
  for (; at && heap[(at - 1) / 2].use < entry.use; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
  heap[at] = entry;
}

static Entry pop(Entry* heap, int64_t size) {
  Entry top = heap[0], moved = heap[--size];
  int64_t at = 0;
  for (int64_t child; (child = 2 * at + 1) < size; at = child) {
    if (child + 1 < size && heap[child + 1].use > heap[child].use) ++child;
    if (heap[child].use <= moved.use) break;
    heap[at] = heap[child];
  }
  if (size) heap[at] = moved;
  return top;
}

// Belady's optimum for a cache that every missed row enters: evicts the row whose next access is farthest away.
int64_t rw_simulate_belady(const Trace* trace, int64_t capacity, Counts* counts) {
  int64_t n = trace->accesses, used = 0, size = 0;
  int64_t* next_use = filled(n, sizeof(int64_t), 0xff);
  int64_t* use_of = filled(trace->rows, sizeof(int64_t), 0xff);  // of cached rows; NOWHERE: not cached
  Entry* heap = malloc((size_t)(n ? n : 1) * sizeof(Entry));     // entries that are out of date stay in it
  int ok = next_use && use_of && heap;
  for (int64_t at = n - 1; ok && at >= 0; --at) {
    int64_t later = use_of[trace->row[at]];
    next_use[at] = later == NOWHERE ? n + at : later;  // rows that are never accessed again differ, too
    use_of[trace->row[at]] = at;
  }
  for (int64_t row = 0; ok && row < trace->rows; ++row) use_of[row] = NOWHERE;
  for (int64_t at = 0; ok && at < n; ++at) {
    int64_t row = trace->row[at], hit = use_of[row] != NOWHERE, evicts = !hit && used == capacity;
    count_access(trace, at, (int)hit, (int)evicts, counts);
    used += !hit && !evicts;
    while (evicts) {
      Entry farthest = pop(heap, size--);
      if (use_of[farthest.row] != farthest.use) continue;
      use_of[farthest.row] = NOWHERE;
      break;
    }
    use_of[row] = next_use[at];
    push(heap, size++, (Entry){next_use[at], row});
  }
  free(next_use), free(use_of), free(heap);
  return ok;
}
