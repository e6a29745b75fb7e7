// Greedy placements: starts of the search, and named methods for comparison.

#include <stdlib.h>
#include <string.h>

#include "state.h"

static int fits(const State* state, int32_t piece, int32_t unit, double link_limit) {
  const Problem* p = state->problem;
  const Ranks ranks = unit_ranks(p, unit);
  for (int32_t r = ranks.begin; r < ranks.end; ++r) {
    const double* sum = state->sum + (size_t)r * state->stride + p->loads;
    if (sum[0] + p->piece_link[piece] > link_limit) return 0;
    for (int32_t m = 0; m < p->tiers; ++m) {
      if (sum[1 + m] + p->piece_bytes[(size_t)piece * p->tiers + m] > p->limit[m]) return 0;
    }
  }
  return 1;
}

typedef struct {
  const Problem* problem;
  State state;
  int32_t measure;
  const double *key, *scale;
  double link_limit;
  double *sums, *ground;  // of each rank: sum of keys, and its present measure
  int32_t *option_of, *item_of;
} Greedy;

// The measure of a rank, with a piece added unless `piece` is negative.
static double measured(const Greedy* g, int32_t rank, int32_t piece) {
  const Problem* p = g->problem;
  if (g->measure == BY_KEY) return g->sums[rank] + (piece < 0 ? 0 : g->key[piece]);
  const double* sum = g->state.sum + (size_t)rank * g->state.stride;
  double load[MAX_LOADS];
  for (int32_t k = 0; k < p->loads; ++k)
    load[k] = sum[k] + (piece < 0 ? 0 : p->piece_load[(size_t)piece * p->loads + k]);
  double value = rw_phi(p, load);
  if (g->measure == BY_PHI) return value;
  value /= g->scale[0];
  const double link = (sum[p->loads] + (piece < 0 ? 0 : p->piece_link[piece])) / g->scale[1];
  value = link > value ? link : value;
  for (int32_t m = 0; m < p->tiers; ++m) {
    const double more = piece < 0 ? 0 : p->piece_bytes[(size_t)piece * p->tiers + m];
    const double share = (sum[p->loads + 1 + m] + more) / g->scale[2 + m];
    value = share > value ? share : value;
  }
  return value;
}

// The unit where a piece adds least; NO_UNIT if it fits nowhere under a bound on links, or is allowed nowhere.
static int32_t least_unit(const Greedy* g, int32_t piece) {
  const Problem* p = g->problem;
  const int32_t world = p->hosts * p->devices;
  const uint8_t kind = p->option_unit_kind[g->option_of[piece]];
  const int32_t first = kind == UNIT_RANK ? 0 : kind == UNIT_HOST ? world : world + p->hosts;
  const int32_t last = kind == UNIT_RANK ? world : kind == UNIT_HOST ? world + p->hosts : world + p->hosts + 1;
  int32_t best = NO_UNIT, best_fits = 0;
  double least = 0;
  for (int32_t u = first; u < last; ++u) {
    const Ranks ranks = unit_ranks(p, u);
    // A piece is taken to lower no measure, so a unit that has reached `least` cannot win.
    if (!unit_allowed(p, g->item_of[piece], u) || (best_fits && g->ground[ranks.begin] >= least)) continue;
    const int within = fits(&g->state, piece, u, g->link_limit);
    if (!within && (g->link_limit < 1e300 || best_fits)) continue;  // with a bound on links, nothing goes over memory
    double worst = 0;
    for (int32_t r = ranks.begin; r < ranks.end; ++r) {
      const double value = measured(g, r, piece);
      worst = value > worst ? value : worst;
    }
    if (best == NO_UNIT || within > best_fits || worst < least) best = u, best_fits = within, least = worst;
  }
  return best;
}

static int greedy_make(Greedy* g) {
  const Problem* p = g->problem;
  const size_t pieces = p->pieces + 1;
  if (!state_make(&g->state, p)) return 0;
  g->option_of = malloc(sizeof(int32_t) * pieces), g->item_of = malloc(sizeof(int32_t) * pieces);
  g->sums = calloc(g->state.world, sizeof(double)), g->ground = calloc(g->state.world, sizeof(double));
  if (!g->option_of || !g->item_of || !g->sums || !g->ground) return 0;
  for (int32_t i = 0; i < p->items; ++i) {
    for (int32_t o = p->item_begin[i]; o < p->item_begin[i + 1]; ++o) {
      for (int32_t q = p->option_begin[o]; q < p->option_begin[o + 1]; ++q) g->option_of[q] = o, g->item_of[q] = i;
    }
  }
  return 1;
}

int32_t rw_greedy(const Problem* problem, const int32_t* order, int32_t count, int32_t measure, const double* key,
                  const double* scale, double link_limit, int32_t* unit) {
  Greedy g = {.problem = problem, .measure = measure, .key = key, .scale = scale, .link_limit = link_limit};
  int32_t done = -1;
  if (greedy_make(&g)) {
    for (done = 0; done < count; ++done) {
      const int32_t piece = order[done], best = least_unit(&g, piece);
      if (best == NO_UNIT) break;
      unit[piece] = best;
      state_begin(&g.state);
      state_put(&g.state, piece, best);
      const Ranks ranks = unit_ranks(problem, best);
      for (int32_t r = ranks.begin; r < ranks.end; ++r) {
        if (key) g.sums[r] += key[piece];
        g.ground[r] = measured(&g, r, -1);
      }
    }
  }
  state_free(&g.state);
  free(g.sums);
  free(g.ground);
  free(g.option_of);
  free(g.item_of);
  return done;
}
