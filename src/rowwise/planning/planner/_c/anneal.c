// [Note: Annealing] Random changes of a placement, kept if it gets better or, while it is hot, not much worse:
//
//   move    a piece of a busy rank to another unit          .40
//   swap    a piece of a busy rank with one of another      .40
//   option  another option for an item, its pieces placed   .20   (splits, merges, other layouts and tiers)
//
// The busy rank is the one with the largest phi, or with the most link seconds, or any. The price of bytes over memory
// limits rises, so the search may cross placements that do not fit but does not stay there. Each change costs
// O(loads + log ranks) for each rank that it touches, and those that touch many ranks count as several moves. The best
// placement that fits is kept; the order of random numbers is a function of the seed.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "search.h"
#include "state.h"

enum { MAX_CHANGES = 4096, TRIES = 3, CHECK_EVERY = 1024, RENEWALS_A_MOVE = 16 };

typedef struct {
  int32_t piece, from, to;
} Change;

typedef struct {
  State state;
  const Problem* problem;
  const Effort* effort;
  uint64_t random;
  int32_t *choice, *item_of;  // item_of: of each option
  int32_t* option_of;         // of each piece
  Change* changes;
  int32_t change_count;
  int32_t changed_item, old_option;
  double stays;  // bytes that stay at home
  double kept_stays;
  int32_t *free_items, free_count;  // items with more than one option
} Search;

static int32_t below(Search* s, int32_t count) { return random_below(&s->random, count); }
static double uniform(Search* s) { return random_uniform(&s->random); }

static double stay(const Search* s, int32_t piece, int32_t unit) {
  return s->problem->home && s->problem->home[piece] == unit ? s->problem->stay_bytes[piece] : 0.0;
}

static void change(Search* s, int32_t piece, int32_t to) {
  const int32_t from = s->state.unit[piece];
  if (from != NO_UNIT) {
    state_take(&s->state, piece);
    s->stays -= stay(s, piece, from);
  }
  if (to != NO_UNIT) {
    state_put(&s->state, piece, to);
    s->stays += stay(s, piece, to);
  }
  s->changes[s->change_count++] = (Change){piece, from, to};
}

static void undo(Search* s) {
  for (int32_t i = s->change_count; i-- > 0;) {
    const Change c = s->changes[i];
    if (c.to != NO_UNIT) state_unlist(&s->state, c.piece);
    if (c.from != NO_UNIT) state_list(&s->state, c.piece, c.from);
  }
  state_undo_sums(&s->state);
  s->stays = s->kept_stays;
  if (s->changed_item >= 0) s->choice[s->changed_item] = s->old_option;
}

static int32_t busy_rank(Search* s) {
  const State* state = &s->state;
  const double dice = uniform(s);
  if (dice >= 0.8) return below(s, state->world);
  const double* top = dice < 0.5 ? state->top_phi : state->top_link;
  int32_t i = 1;
  while (i < state->leaves) i = top[2 * i] >= top[2 * i + 1] ? 2 * i : 2 * i + 1;
  return i - state->leaves < state->world ? i - state->leaves : below(s, state->world);
}

// A piece that adds to a rank: of its own, of its host, or (if `count` is 3) of all; -1 if there is none.
static int32_t piece_on(Search* s, int32_t rank, int32_t count) {
  const State* state = &s->state;
  const int32_t units[3] = {rank, state->world + rank / s->problem->devices, state->units - 1};
  int32_t all = 0;
  for (int32_t i = 0; i < count; ++i) all += state->length[units[i]];
  if (!all) return -1;
  int32_t chosen = below(s, all);
  for (int32_t i = 0; i < count; ++i) {
    if (chosen < state->length[units[i]]) return state->list[units[i]][chosen];
    chosen -= state->length[units[i]];
  }
  return -1;
}

static int32_t random_unit(Search* s, uint8_t unit_kind) {
  const int32_t world = s->state.world;
  if (unit_kind == UNIT_RANK) return below(s, world);
  return unit_kind == UNIT_HOST ? world + below(s, s->problem->hosts) : s->state.units - 1;
}

static double unit_load(const Search* s, int32_t unit) {
  const int32_t rank = unit_ranks(s->problem, unit).begin;  // the ranks of a unit are much alike
  return s->state.phi[rank] + s->state.sum[(size_t)rank * s->state.stride + s->problem->loads] +
         s->state.over[rank] * s->state.top_phi[1];
}

// A unit that a piece may go to: the least loaded of a few; NO_UNIT if none of them is allowed.
static int32_t good_unit(Search* s, int32_t item, uint8_t unit_kind, int32_t tries) {
  int32_t best = NO_UNIT;
  double least = 0;
  for (int32_t i = 0; i < tries; ++i) {
    const int32_t unit = random_unit(s, unit_kind);
    if (!unit_allowed(s->problem, item, unit)) continue;
    const double load = unit_load(s, unit);
    if (best == NO_UNIT || load < least) best = unit, least = load;
  }
  return best;
}

static int try_move(Search* s) {
  const int32_t piece = piece_on(s, busy_rank(s), 2);
  if (piece < 0) return 0;
  const int32_t option = s->option_of[piece], item = s->item_of[option];
  const uint8_t unit_kind = s->problem->option_unit_kind[option];
  if (unit_kind == UNIT_ALL) return 0;
  int32_t to = good_unit(s, item, unit_kind, 1 + below(s, TRIES));
  if (s->problem->home && below(s, 4) == 0) to = s->problem->home[piece];
  if (to < 0 || to == s->state.unit[piece] || !unit_allowed(s->problem, item, to)) return 0;
  change(s, piece, to);
  return 1;
}

static int try_swap(Search* s) {
  const int32_t a = piece_on(s, busy_rank(s), 2);
  if (a < 0) return 0;
  const int32_t option = s->option_of[a], unit_a = s->state.unit[a];
  const uint8_t unit_kind = s->problem->option_unit_kind[option];
  if (unit_kind == UNIT_ALL) return 0;
  const int32_t unit_b = random_unit(s, unit_kind);
  if (unit_b == unit_a || !s->state.length[unit_b]) return 0;
  const int32_t b = s->state.list[unit_b][below(s, s->state.length[unit_b])];
  if (!unit_allowed(s->problem, s->item_of[option], unit_b) ||
      !unit_allowed(s->problem, s->item_of[s->option_of[b]], unit_a)) {
    return 0;
  }
  change(s, a, unit_b);
  change(s, b, unit_a);
  return 1;
}

static int32_t item_to_change(Search* s) {
  if (below(s, 4)) {
    const int32_t piece = piece_on(s, busy_rank(s), 3);
    if (piece >= 0) return s->item_of[s->option_of[piece]];
  }
  return s->free_items[below(s, s->free_count)];
}

static int try_option(Search* s) {
  if (!s->free_count) return 0;
  const Problem* p = s->problem;
  const int32_t item = item_to_change(s), first = p->item_begin[item], count = p->item_begin[item + 1] - first;
  if (count < 2) return 0;
  const int32_t old = s->choice[item];
  // Mostly a neighbour, as options are in order of how far they split; sometimes any.
  int32_t option = first + below(s, count);
  if (below(s, 2)) option = old + (below(s, 2) ? 1 : -1);
  if (option == old || option < first || option >= first + count) return 0;
  const int32_t begin = p->option_begin[option], end = p->option_begin[option + 1];
  const int32_t old_pieces = p->option_begin[old + 1] - p->option_begin[old];
  if (end - begin + old_pieces > MAX_CHANGES) return 0;
  for (int32_t q = p->option_begin[old]; q < p->option_begin[old + 1]; ++q) change(s, q, NO_UNIT);
  s->changed_item = item, s->old_option = old, s->choice[item] = option;
  for (int32_t q = begin; q < end; ++q) {
    int32_t unit = good_unit(s, item, p->option_unit_kind[option], 1 + below(s, TRIES));
    if (p->home && below(s, 2) && unit_allowed(p, item, p->home[q])) unit = p->home[q];
    for (int32_t tries = 0; unit == NO_UNIT && tries < 64; ++tries)
      unit = good_unit(s, item, p->option_unit_kind[option], 4);
    if (unit == NO_UNIT) return undo(s), 0;
    change(s, q, unit);
  }
  return 1;
}

static int search_make(Search* s, const Problem* problem, const Effort* effort, int32_t* choice) {
  memset(s, 0, sizeof *s);
  s->problem = problem, s->effort = effort, s->choice = choice, s->random = effort->seed;
  s->item_of = malloc(sizeof(int32_t) * (problem->options + 1));
  s->option_of = malloc(sizeof(int32_t) * (problem->pieces + 1));
  s->changes = malloc(sizeof(Change) * (MAX_CHANGES + 2));
  s->free_items = malloc(sizeof(int32_t) * (problem->items + 1));
  if (!s->item_of || !s->option_of || !s->changes || !s->free_items || !state_make(&s->state, problem)) return 0;
  for (int32_t i = 0; i < problem->items; ++i) {
    const int32_t begin = problem->item_begin[i], end = problem->item_begin[i + 1];
    if (end - begin > 1) s->free_items[s->free_count++] = i;
    for (int32_t o = begin; o < end; ++o) {
      s->item_of[o] = i;
      for (int32_t p = problem->option_begin[o]; p < problem->option_begin[o + 1]; ++p) s->option_of[p] = o;
    }
  }
  return 1;
}

static void search_free(Search* s) {
  state_free(&s->state);
  free(s->item_of);
  free(s->option_of);
  free(s->changes);
  free(s->free_items);
}

static double root16(double x) { return x > 0 ? sqrt(sqrt(sqrt(sqrt(x)))) : 0; }

// The cost mixed with a smooth maximum, to which all ranks contribute, less the price of bytes that stay at home.
static double objective(const Search* s) {
  const State* state = &s->state;
  const double smooth = state->phi_scale * root16(state->phi_power / state->world) +
                        state->link_scale * root16(state->link_power / state->world);
  return (1 - s->effort->smooth) * state_cost(state) + s->effort->smooth * smooth - s->effort->bytes_price * s->stays;
}

typedef struct {
  double value, cost, over;
  int32_t *choice, *unit;
} Best;

static void remember(Best* best, const Search* s, double value) {
  const Problem* p = s->problem;
  best->value = value, best->cost = state_cost(&s->state), best->over = s->state.all_over;
  memcpy(best->choice, s->choice, sizeof(int32_t) * p->items);
  memcpy(best->unit, s->state.unit, sizeof(int32_t) * p->pieces);
}

static int is_better(const Best* best, double value, double over) {
  const double none = 1e-12;
  if (over > none) return best->over > none && over < best->over * (1 - 1e-9);
  return best->over > none || value < best->value * (1 - 1e-12);
}

static int32_t run(Search* s, Best* best, int64_t* tried) {
  const Effort* effort = s->effort;
  const double begin_s = now_s(), scale = state_cost(&s->state);
  const double cooling = effort->cold > 0 ? log(effort->cold / effort->hot) : 0;
  double heat = effort->hot * scale, price = scale, value = objective(s);
  int32_t late = 0;
  s->state.renewals = 0;
  for (int64_t move = 0; move < effort->moves; ++move) {
    if (move % CHECK_EVERY == 0) {
      const double work = fmax((double)move, (double)s->state.renewals / RENEWALS_A_MOVE) / (double)effort->moves;
      const double spent = move ? fmin((now_s() - begin_s) / effort->limit_s, 1.0) : 0;
      if (spent >= 1 || (effort->timed && spent > work)) late = 1;
      if (move && (spent >= 1 || work >= 1)) return *tried = move, late;
      const double done = effort->timed ? fmax(work, spent) : work;
      heat = scale * effort->hot * exp(cooling * done);
      state_scale(&s->state, s->state.top_phi[1], s->state.top_link[1]);  // also clears rounding errors of the sums
      value = objective(s);
      price = scale * exp(6.0 * done);
    }
    state_begin(&s->state);
    s->change_count = 0, s->changed_item = -1, s->kept_stays = s->stays;
    const double before = value + price * s->state.all_over, dice = uniform(s);
    const int changed = dice < 0.4 ? try_move(s) : dice < 0.8 ? try_swap(s) : try_option(s);
    if (!changed) continue;
    const double changed_value = objective(s), worse = changed_value + price * s->state.all_over - before;
    if (worse > 0 && uniform(s) >= exp(-worse / heat)) {
      undo(s);
      continue;
    }
    value = changed_value;
    const double priced = state_cost(&s->state) - effort->bytes_price * s->stays;
    if (is_better(best, priced, s->state.all_over)) remember(best, s, priced);
  }
  return *tried = effort->moves, late;
}

Found rw_anneal(const Problem* problem, const Effort* effort, int32_t* choice, int32_t* unit) {
  Search s;
  Best best = {0, 0, 0, malloc(sizeof(int32_t) * (problem->items + 1)),
               malloc(sizeof(int32_t) * (problem->pieces + 1))};
  Found result = {-1, -1, 0, 0};
  if (search_make(&s, problem, effort, choice) && best.choice && best.unit) {
    state_begin(&s.state);
    for (int32_t p = 0; p < problem->pieces; ++p) {
      if (unit[p] != NO_UNIT) {
        state_put(&s.state, p, unit[p]);
        s.stays += stay(&s, p, unit[p]);
      }
    }
    remember(&best, &s, state_cost(&s.state) - effort->bytes_price * s.stays);
    result.stopped = run(&s, &best, &result.moves);
    memcpy(choice, best.choice, sizeof(int32_t) * problem->items);
    memcpy(unit, best.unit, sizeof(int32_t) * problem->pieces);
    result.cost = best.cost, result.over = best.over > 1e-12 ? best.over : 0;
  }
  search_free(&s);
  free(best.choice);
  free(best.unit);
  return result;
}
