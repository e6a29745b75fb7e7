#include "state.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double norm(const double* load, int32_t count, double power) {
  if (power == 1.0) {
    double sum = 0;
    for (int32_t i = 0; i < count; ++i) sum += load[i];
    return sum;
  }
  double top = 0;
  for (int32_t i = 0; i < count; ++i) top = load[i] > top ? load[i] : top;
  if (top == 0) return 0;
  double sum = 0;
  if (power == 6.0) {
    for (int32_t i = 0; i < count; ++i) {
      const double x = load[i] / top, cube = x * x * x;
      sum += cube * cube;
    }
    return top * cbrt(sqrt(sum));
  }
  for (int32_t i = 0; i < count; ++i) sum += pow(load[i] / top, power);
  return top * pow(sum, 1.0 / power);
}

// A layer of a network, less its value at no load. Hinges are the inner loop, which vectorises without reordered sums.
static double hinges(const Problem* problem, const double* load) {
  const int32_t count = problem->hinges;
  double height[MAX_HINGES];
  memcpy(height, problem->hinge_offset, sizeof(double) * count);
  for (int32_t k = 0; k < problem->loads; ++k) {
    const double* weight = problem->hinge_weight + (size_t)k * count;
    const double x = load[k];
    if (x == 0) continue;
    for (int32_t h = 0; h < count; ++h) height[h] += x * weight[h];
  }
  double total = 0;
  for (int32_t h = 0; h < count; ++h) {
    const double value = height[h] > 0 ? height[h] : 0;
    const double base = problem->hinge_offset[h] > 0 ? problem->hinge_offset[h] : 0;
    total += (value - base) * problem->hinge_out[h];
  }
  return total;
}

double rw_phi(const Problem* problem, const double* load) {
  double total = problem->constant;
  int32_t begin = 0;
  for (int32_t g = 0; g < problem->groups; ++g) {
    total += norm(load + begin, problem->group_end[g] - begin, problem->group_power[g]);
    begin = problem->group_end[g];
  }
  if (problem->hinges) total += hinges(problem, load);
  return total > 0 ? total : 0;
}

Ranks unit_ranks(const Problem* problem, int32_t unit) {
  const int32_t world = problem->hosts * problem->devices;
  if (unit < world) return (Ranks){unit, unit + 1};
  if (unit < world + problem->hosts) {
    const int32_t begin = (unit - world) * problem->devices;
    return (Ranks){begin, begin + problem->devices};
  }
  return (Ranks){0, world};
}

int unit_allowed(const Problem* problem, int32_t item, int32_t unit) {
  const int32_t rule = problem->item_rule[item];
  const int32_t units = problem->hosts * problem->devices + problem->hosts + 1;
  return rule < 0 || problem->allowed[(size_t)rule * units + unit];
}

int state_make(State* state, const Problem* problem) {
  memset(state, 0, sizeof *state);
  state->problem = problem;
  state->phi_scale = state->link_scale = 1;
  state->world = problem->hosts * problem->devices;
  state->units = state->world + problem->hosts + 1;
  state->stride = problem->loads + 1 + problem->tiers;
  for (state->leaves = 1; state->leaves < state->world;) state->leaves *= 2;
  const size_t world = state->world;
  state->sum = calloc(world * state->stride, sizeof(double));
  state->phi = calloc(world, sizeof(double));
  state->over = calloc(world, sizeof(double));
  state->top_phi = calloc(2 * state->leaves, sizeof(double));
  state->top_link = calloc(2 * state->leaves, sizeof(double));
  state->unit = malloc(sizeof(int32_t) * (problem->pieces + 1));
  state->slot = malloc(sizeof(int32_t) * (problem->pieces + 1));
  state->list = calloc(state->units, sizeof(int32_t*));
  state->length = calloc(state->units, sizeof(int32_t));
  state->room = calloc(state->units, sizeof(int32_t));
  state->touched = malloc(sizeof(int32_t) * world);
  state->stamp = calloc(world, sizeof(int32_t));
  state->kept = malloc(sizeof(double) * world * (state->stride + 2));
  if (!state->sum || !state->phi || !state->over || !state->top_phi || !state->top_link || !state->unit ||
      !state->slot || !state->list || !state->length || !state->room || !state->touched || !state->stamp ||
      !state->kept) {
    state_free(state);
    return 0;
  }
  for (int32_t p = 0; p < problem->pieces; ++p) state->unit[p] = NO_UNIT;
  for (int32_t r = 0; r < state->world; ++r) {
    state->phi[r] = problem->constant;
    for (int32_t i = state->leaves + r; i >= 1; i /= 2) {
      if (state->top_phi[i] < problem->constant) state->top_phi[i] = problem->constant;
    }
  }
  return 1;
}

void state_free(State* state) {
  if (state->list) {
    for (int32_t u = 0; u < state->units; ++u) free(state->list[u]);
  }
  free(state->sum);
  free(state->phi);
  free(state->over);
  free(state->top_phi);
  free(state->top_link);
  free(state->unit);
  free(state->slot);
  free(state->list);
  free(state->length);
  free(state->room);
  free(state->touched);
  free(state->stamp);
  free(state->kept);
}

void state_scale(State* state, double phi, double link) {
  state->phi_scale = phi, state->link_scale = link > 0 ? link : 1;
  state->phi_power = state->link_power = 0;
  for (int32_t r = 0; r < state->world; ++r) {
    state->phi_power += power16(state->phi[r] / state->phi_scale);
    state->link_power += power16(state->top_link[state->leaves + r] / state->link_scale);
  }
}

void state_begin(State* state) {
  state->now++;
  state->touched_count = 0;
  state->kept_over = state->all_over;
  state->kept_phi_power = state->phi_power;
  state->kept_link_power = state->link_power;
}

static void raise_tree(double* top, int32_t leaf, double value) {
  top[leaf] = value;
  for (int32_t i = leaf / 2; i >= 1; i /= 2) {
    const double a = top[2 * i], b = top[2 * i + 1], larger = a > b ? a : b;
    if (top[i] == larger) break;  // all maxima above are unchanged, too
    top[i] = larger;
  }
}

// Saves a rank before its first change since state_begin.
static void keep(State* state, int32_t rank) {
  if (state->stamp[rank] == state->now) return;
  state->stamp[rank] = state->now;
  double* kept = state->kept + (size_t)state->touched_count * (state->stride + 2);
  memcpy(kept, state->sum + (size_t)rank * state->stride, sizeof(double) * state->stride);
  kept[state->stride] = state->phi[rank];
  kept[state->stride + 1] = state->over[rank];
  state->touched[state->touched_count++] = rank;
}

// Recomputes phi, maxima and overflow of a rank from its sums.
static void renew(State* state, int32_t rank) {
  state->renewals++;
  const Problem* problem = state->problem;
  const double* sum = state->sum + (size_t)rank * state->stride;
  const double phi = rw_phi(problem, sum), link = sum[problem->loads];
  state->phi_power += power16(phi / state->phi_scale) - power16(state->phi[rank] / state->phi_scale);
  state->link_power +=
      power16(link / state->link_scale) - power16(state->top_link[state->leaves + rank] / state->link_scale);
  state->phi[rank] = phi;
  raise_tree(state->top_phi, state->leaves + rank, phi);
  raise_tree(state->top_link, state->leaves + rank, link);
  double over = 0;
  for (int32_t m = 0; m < problem->tiers; ++m) {
    const double more = sum[problem->loads + 1 + m] - problem->limit[m];
    if (more > 0) over += more / (problem->limit[m] > 1 ? problem->limit[m] : 1);
  }
  state->all_over += over - state->over[rank];
  state->over[rank] = over;
}

static void add(State* state, int32_t piece, int32_t unit, double sign) {
  const Problem* problem = state->problem;
  const Ranks ranks = unit_ranks(problem, unit);
  const double* load = problem->piece_load + (size_t)piece * problem->loads;
  const double* bytes = problem->piece_bytes + (size_t)piece * problem->tiers;
  for (int32_t r = ranks.begin; r < ranks.end; ++r) {
    keep(state, r);
    double* sum = state->sum + (size_t)r * state->stride;
    for (int32_t k = 0; k < problem->loads; ++k) {
      const double left = sum[k] + sign * load[k];
      sum[k] = left > 0 ? left : 0;  // rounding may leave less than 0
    }
    const double left = sum[problem->loads] + sign * problem->piece_link[piece];
    sum[problem->loads] = left > 0 ? left : 0;
    for (int32_t m = 0; m < problem->tiers; ++m) sum[problem->loads + 1 + m] += sign * bytes[m];
    renew(state, r);
  }
}

void state_list(State* state, int32_t piece, int32_t unit) {
  if (state->length[unit] == state->room[unit]) {
    const int32_t room = state->room[unit] ? 2 * state->room[unit] : 16;
    int32_t* list = realloc(state->list[unit], sizeof(int32_t) * room);
    if (!list) abort();
    state->list[unit] = list;
    state->room[unit] = room;
  }
  state->slot[piece] = state->length[unit];
  state->list[unit][state->length[unit]++] = piece;
  state->unit[piece] = unit;
}

void state_unlist(State* state, int32_t piece) {
  const int32_t unit = state->unit[piece], last = state->list[unit][--state->length[unit]];
  state->list[unit][state->slot[piece]] = last;
  state->slot[last] = state->slot[piece];
  state->unit[piece] = NO_UNIT;
}

void state_put(State* state, int32_t piece, int32_t unit) {
  state_list(state, piece, unit);
  add(state, piece, unit, 1.0);
}

void state_take(State* state, int32_t piece) {
  const int32_t unit = state->unit[piece];
  state_unlist(state, piece);
  add(state, piece, unit, -1.0);
}

void state_undo_sums(State* state) {
  for (int32_t i = 0; i < state->touched_count; ++i) {
    const int32_t rank = state->touched[i];
    const double* kept = state->kept + (size_t)i * (state->stride + 2);
    memcpy(state->sum + (size_t)rank * state->stride, kept, sizeof(double) * state->stride);
    state->phi[rank] = kept[state->stride];
    state->over[rank] = kept[state->stride + 1];
    raise_tree(state->top_phi, state->leaves + rank, state->phi[rank]);
    raise_tree(state->top_link, state->leaves + rank, kept[state->problem->loads]);
  }
  state->all_over = state->kept_over;
  state->phi_power = state->kept_phi_power;
  state->link_power = state->kept_link_power;
}

double rw_cost(const Problem* problem, const int32_t* unit, double* over) {
  State state;
  if (!state_make(&state, problem)) return -1;
  state_begin(&state);
  for (int32_t p = 0; p < problem->pieces; ++p) {
    if (unit[p] != NO_UNIT) state_put(&state, p, unit[p]);
  }
  const double cost = state_cost(&state);
  double total = 0;
  for (int32_t r = 0; r < state.world; ++r) total += state.over[r];
  *over = total;
  state_free(&state);
  return cost;
}
