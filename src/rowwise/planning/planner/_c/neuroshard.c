// NeuroShard's published search, for comparison, over our costs: a beam over halvings of columns; for each set of
// pieces a greedy placement under several bounds on the dims of a rank, the best of which counts.
//
// A piece is (item, level): the item's columns halved `level` times. Only ranks, never groups of them.

#include <stdlib.h>
#include <string.h>

#include "state.h"

enum { MAX_SHARDS = 65536 };

typedef struct {
  int32_t item, level, rank;
} Shard;

typedef struct {
  Shard* shards;
  int32_t count;
  double cost;
} Plan;

typedef struct {
  const Problem* problem;
  const Neuroshard* how;
  const int32_t* halving;  // items x levels: the piece, or -1 where columns cannot be halved so often
  int32_t levels, world;
  double* single;  // items x levels: phi of a piece alone
  double *sum, *phi;
} Beam;

static int32_t piece_of(const Beam* b, Shard s) { return b->halving[(size_t)s.item * b->levels + s.level]; }
static double single(const Beam* b, Shard s) { return b->single[(size_t)s.item * b->levels + s.level]; }

static double phi_with(const Beam* b, int32_t rank, int32_t piece) {
  const Problem* p = b->problem;
  const double* sum = b->sum + (size_t)rank * (p->loads + 1 + p->tiers);
  double load[MAX_LOADS];
  for (int32_t k = 0; k < p->loads; ++k) load[k] = sum[k] + p->piece_load[(size_t)piece * p->loads + k];
  return rw_phi(p, load);
}

static int has_room(const Beam* b, int32_t rank, int32_t piece, double link_limit) {
  const Problem* p = b->problem;
  const double* sum = b->sum + (size_t)rank * (p->loads + 1 + p->tiers) + p->loads;
  if (sum[0] + p->piece_link[piece] > link_limit) return 0;
  for (int32_t m = 0; m < p->tiers; ++m) {
    if (sum[1 + m] + p->piece_bytes[(size_t)piece * p->tiers + m] > p->limit[m]) return 0;
  }
  return 1;
}

// One greedy placement of shards in order; its cost, or infinity (1e300) if a shard fits nowhere.
static double place(Beam* b, Shard* shards, int32_t count, double link_limit) {
  const Problem* p = b->problem;
  const int32_t stride = p->loads + 1 + p->tiers;
  memset(b->sum, 0, sizeof(double) * b->world * stride);
  for (int32_t r = 0; r < b->world; ++r) b->phi[r] = p->constant;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t piece = piece_of(b, shards[i]);
    int32_t best = -1;
    double least = 0;
    for (int32_t r = 0; r < b->world; ++r) {
      if (b->phi[r] >= least && best >= 0) continue;  // a piece never lowers phi
      if (!unit_allowed(p, shards[i].item, r) || !has_room(b, r, piece, link_limit)) continue;
      const double value = phi_with(b, r, piece);
      if (best < 0 || value < least) best = r, least = value;
    }
    if (best < 0) return 1e300;
    double* sum = b->sum + (size_t)best * stride;
    for (int32_t k = 0; k < p->loads; ++k) sum[k] += p->piece_load[(size_t)piece * p->loads + k];
    sum[p->loads] += p->piece_link[piece];
    for (int32_t m = 0; m < p->tiers; ++m) sum[p->loads + 1 + m] += p->piece_bytes[(size_t)piece * p->tiers + m];
    b->phi[best] = least;
    shards[i].rank = best;
  }
  double phi = 0, link = 0;
  for (int32_t r = 0; r < b->world; ++r) {
    const double link_s = b->sum[(size_t)r * stride + p->loads];
    phi = b->phi[r] > phi ? b->phi[r] : phi;
    link = link_s > link ? link_s : link;
  }
  return phi + link;
}

typedef struct {
  double key;
  int32_t index;
} Keyed;

static int by_key_down(const void* x, const void* y) {
  const Keyed *a = x, *b = y;
  if (a->key != b->key) return a->key < b->key ? 1 : -1;
  return a->index - b->index;
}

static void grid(Beam* b, Plan* plan, Keyed* keyed, Shard* sorted, Shard* best) {
  double mean = 0;
  for (int32_t i = 0; i < plan->count; ++i) {
    keyed[i] = (Keyed){single(b, plan->shards[i]), i};
    mean += b->problem->piece_link[piece_of(b, plan->shards[i])];
  }
  mean /= b->world;
  qsort(keyed, plan->count, sizeof *keyed, by_key_down);
  for (int32_t i = 0; i < plan->count; ++i) sorted[i] = plan->shards[keyed[i].index];
  plan->cost = 1e300;
  for (int32_t g = 0; g < b->how->grid; ++g) {
    const double loose = b->how->grid > 1 ? 1 + (b->how->widest - 1) * g / (b->how->grid - 1) : b->how->widest;
    const double cost = place(b, sorted, plan->count, mean * loose * (1 + 1e-12));
    if (cost < plan->cost || g == 0) {
      if (cost < plan->cost) plan->cost = cost;
      memcpy(best, sorted, sizeof(Shard) * plan->count);
    }
  }
  memcpy(plan->shards, best, sizeof(Shard) * plan->count);
}

// Appends the largest shards by a key to `out`, each once; returns the new count.
static int32_t candidates(const Beam* b, const Plan* plan, int by_size, Keyed* keyed, int32_t* out, int32_t count) {
  const Problem* p = b->problem;
  int32_t eligible = 0;
  for (int32_t i = 0; i < plan->count; ++i) {
    const Shard s = plan->shards[i];
    if (s.level + 1 >= b->levels || b->halving[(size_t)s.item * b->levels + s.level + 1] < 0) continue;
    keyed[eligible++] = (Keyed){by_size ? p->piece_bytes[(size_t)piece_of(b, s) * p->tiers] : single(b, s), i};
  }
  qsort(keyed, eligible, sizeof *keyed, by_key_down);
  for (int32_t i = 0; i < eligible && i < b->how->candidates; ++i) {
    int known = 0;
    for (int32_t j = 0; j < count; ++j) known |= out[j] == keyed[i].index;
    if (!known) out[count++] = keyed[i].index;
  }
  return count;
}

static int by_cost(const void* x, const void* y) {
  const Plan *a = x, *b = y;
  return a->cost < b->cost ? -1 : a->cost > b->cost;
}

static int search(Beam* b, Plan* result, int32_t room) {
  const int32_t width = b->how->beam * b->how->candidates * 2 + b->how->beam;
  Plan *beam = calloc(b->how->beam, sizeof *beam), *next = calloc(width, sizeof *next);
  Keyed* keyed = malloc(sizeof *keyed * room);
  Shard *sorted = malloc(sizeof *sorted * room), *best = malloc(sizeof *best * room);
  int32_t* split = malloc(sizeof *split * (2 * b->how->candidates + 1));
  int ok = beam && next && keyed && sorted && best && split;
  int32_t kept = 1;
  for (int32_t i = 0; ok && i < b->how->beam; ++i) ok = (beam[i].shards = malloc(sizeof(Shard) * room)) != NULL;
  for (int32_t i = 0; ok && i < width; ++i) ok = (next[i].shards = malloc(sizeof(Shard) * room)) != NULL;
  if (ok) {
    beam[0].count = result->count;
    memcpy(beam[0].shards, result->shards, sizeof(Shard) * result->count);
    grid(b, &beam[0], keyed, sorted, best);
    result->cost = beam[0].cost;
    memcpy(result->shards, beam[0].shards, sizeof(Shard) * result->count);
  }
  for (int32_t level = 0; ok && level < b->how->depth && kept; ++level) {
    int32_t children = 0;
    for (int32_t i = 0; i < kept; ++i) {
      int32_t count = candidates(b, &beam[i], 1, keyed, split, 0);
      count = candidates(b, &beam[i], 0, keyed, split, count);
      for (int32_t j = 0; j < count && beam[i].count + 1 < room; ++j) {
        Plan* plan = &next[children++];
        memcpy(plan->shards, beam[i].shards, sizeof(Shard) * beam[i].count);
        plan->count = beam[i].count + 1;
        plan->shards[split[j]].level++;
        plan->shards[plan->count - 1] = plan->shards[split[j]];
        grid(b, plan, keyed, sorted, best);
      }
    }
    qsort(next, children, sizeof *next, by_cost);
    kept = children < b->how->beam ? children : b->how->beam;
    for (int32_t i = 0; i < kept; ++i) {
      const Plan swap = beam[i];
      beam[i] = next[i];
      next[i] = swap;
    }
    if (kept && beam[0].cost < result->cost) {
      result->cost = beam[0].cost, result->count = beam[0].count;
      memcpy(result->shards, beam[0].shards, sizeof(Shard) * beam[0].count);
    }
  }
  for (int32_t i = 0; beam && i < b->how->beam; ++i) free(beam[i].shards);
  for (int32_t i = 0; next && i < width; ++i) free(next[i].shards);
  free(beam);
  free(next);
  free(keyed);
  free(sorted);
  free(best);
  free(split);
  return ok;
}

double rw_neuroshard(const Problem* problem, const Neuroshard* how, const int32_t* halving, int32_t levels,
                     int32_t* out_piece, int32_t* out_rank, int32_t* out_count) {
  Beam b = {problem, how, halving, levels, problem->hosts * problem->devices, NULL, NULL, NULL};
  const int32_t room = problem->items + how->depth + 1;
  Plan result = {malloc(sizeof(Shard) * room), problem->items, 1e300};
  b.single = malloc(sizeof(double) * problem->items * levels);
  b.sum = malloc(sizeof(double) * b.world * (problem->loads + 1 + problem->tiers));
  b.phi = malloc(sizeof(double) * b.world);
  double cost = -1;
  if (result.shards && b.single && b.sum && b.phi && room < MAX_SHARDS) {
    for (int32_t i = 0; i < problem->items; ++i) {
      result.shards[i] = (Shard){i, 0, -1};
      for (int32_t l = 0; l < levels; ++l) {
        const int32_t piece = halving[(size_t)i * levels + l];
        if (piece >= 0)
          b.single[(size_t)i * levels + l] = rw_phi(problem, problem->piece_load + (size_t)piece * problem->loads);
      }
    }
    if (search(&b, &result, room)) {
      cost = result.cost;
      *out_count = result.count;
      for (int32_t i = 0; i < result.count; ++i) {
        out_piece[i] = piece_of(&b, result.shards[i]);
        out_rank[i] = result.shards[i].rank;
      }
    }
  }
  free(result.shards);
  free(b.single);
  free(b.sum);
  free(b.phi);
  return cost;
}
