// [Note: Orders of hosts] Random changes of an order, kept if it gets better or, while it is hot, not much worse: two
// hosts swapped, a run of hosts reversed, one host moved. The largest of many times has plateaus, so a tenth of their
// mean is added to it. `rowwise/planning/perf/collective.py` has the formulas; an all-reduce here is its ring.
//
// With `keep_first`, host 0 stays first, and a group that is not one run of hosts costs as much as the collective
// again.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"
#include "search.h"

enum { RING = 0, HALVING_DOUBLING = 1, TREE = 2, CHECK_EVERY = 256, MAX_EXACT = 8 };
static const double SMOOTH = 0.1, MIN_GAIN = 1e-9;  // a smaller gain is rounding

typedef struct {
  double slowest, mean;
  int32_t torn;  // runs of hosts of one group, beyond one a group
} Seconds;

typedef struct {
  const Links* links;
  double* rate;        // of each flow of a step
  double* wait;        // of each place of a tree, from its root
  int32_t* flows_out;  // of each group
  int32_t* flows_in;
} Scratch;

static double lesser(double a, double b) { return a < b ? a : b; }
static double greater(double a, double b) { return a > b ? a : b; }

static int scratch_make(Scratch* s, const Links* links) {
  s->links = links;
  s->rate = malloc(sizeof(double) * (size_t)links->hosts);
  s->wait = malloc(sizeof(double) * (size_t)links->hosts);
  s->flows_out = malloc(sizeof(int32_t) * (size_t)links->groups);
  s->flows_in = malloc(sizeof(int32_t) * (size_t)links->groups);
  return s->rate && s->wait && s->flows_out && s->flows_in;
}

static void scratch_free(Scratch* s) { free(s->rate), free(s->wait), free(s->flows_out), free(s->flows_in); }

// The place that place k sends to in step `distance`: the next of a ring, the partner, the parent in a tree.
static int32_t target_of(const Links* links, int32_t k, int32_t distance) {
  if (links->collective == RING) return k + 1 == links->hosts ? 0 : k + 1;
  return links->collective == HALVING_DOUBLING ? k ^ distance : (k - 1) / 2;
}

// Bytes a second of the concurrent flows of a step; see [Note: Flows] in rowwise/planning/perf/collective.py.
static void find_rates(Scratch* s, const int32_t* order, int32_t distance) {
  const Links* links = s->links;
  const int32_t hosts = links->hosts, first = links->collective == TREE;
  memset(s->flows_out, 0, sizeof(int32_t) * (size_t)links->groups);
  memset(s->flows_in, 0, sizeof(int32_t) * (size_t)links->groups);
  for (int32_t k = first; k < hosts; k++) {
    const int32_t from = links->group[order[k]], to = links->group[order[target_of(links, k, distance)]];
    if (from != to) s->flows_out[from]++, s->flows_in[to]++;
  }
  for (int32_t k = first; k < hosts; k++) {
    const int32_t a = order[k], b = order[target_of(links, k, distance)];
    const int32_t from = links->group[a], to = links->group[b];
    double rate = links->rate[(size_t)a * hosts + b];
    if (links->collective == TREE && (k % 2 == 0 || k + 1 < hosts)) rate /= 2;  // the parent has another child
    if (from != to)
      rate = lesser(rate, lesser(links->uplink[from] / s->flows_out[from], links->uplink[to] / s->flows_in[to]));
    s->rate[k] = rate;
  }
}

static double latency_of(const Links* links, const int32_t* order, int32_t k, int32_t to) {
  return links->latency[(size_t)order[k] * links->hosts + order[to]];
}

static Seconds ring(Scratch* s, const int32_t* order) {
  const Links* links = s->links;
  const int32_t hosts = links->hosts, steps = 2 * (hosts - 1);
  const double share = links->size_bytes / hosts;
  double slowest = 0, way = 0, least_two = INFINITY;
  find_rates(s, order, 0);
  const double last = latency_of(links, order, hosts - 1, 0) + share / s->rate[hosts - 1];
  double before = last;
  for (int32_t k = 0; k < hosts; k++) {
    const double sending = share / s->rate[k];
    const double hop_s = latency_of(links, order, k, k + 1 == hosts ? 0 : k + 1) + sending;
    slowest = greater(slowest, sending);
    least_two = lesser(least_two, before + hop_s);
    way += hop_s;
    before = hop_s;
  }
  // Over 2 (H - 1) links in a row: twice round, less the two neighbouring links that take least.
  const double longest = hosts > 2 ? 2 * way - least_two : way;
  return (Seconds){greater(steps * slowest, longest), steps * way / hosts, 0};
}

static Seconds halving_doubling(Scratch* s, const int32_t* order) {
  const Links* links = s->links;
  Seconds total = {0, 0, 0};
  for (int32_t distance = 1; distance < links->hosts; distance *= 2) {
    double slowest = 0, sum = 0;
    find_rates(s, order, distance);
    for (int32_t k = 0; k < links->hosts; k++) {
      const double message_s =
          latency_of(links, order, k, k ^ distance) + links->size_bytes / (2 * distance) / s->rate[k];
      slowest = greater(slowest, message_s);
      sum += message_s;
    }
    total.slowest += 2 * slowest;
    total.mean += 2 * sum / links->hosts;
  }
  return total;
}

static Seconds tree(Scratch* s, const int32_t* order) {
  const Links* links = s->links;
  double slowest = 0, deepest = 0, sum = 0;
  find_rates(s, order, 0);
  s->wait[0] = 0;
  for (int32_t k = 1; k < links->hosts; k++) {
    const int32_t parent = (k - 1) / 2;
    s->wait[k] = s->wait[parent] + latency_of(links, order, k, parent);
    deepest = greater(deepest, s->wait[k]);
    slowest = greater(slowest, links->size_bytes / s->rate[k]);
    sum += s->wait[k] + links->size_bytes / s->rate[k];
  }
  return (Seconds){2 * (deepest + slowest), 2 * sum / links->hosts, 0};
}

static int32_t torn_groups(const Links* links, const int32_t* order) {
  int32_t runs = 1;
  for (int32_t k = 1; k < links->hosts; k++) runs += links->group[order[k]] != links->group[order[k - 1]];
  return runs - links->groups;
}

static Seconds seconds_of(Scratch* s, const int32_t* order) {
  const Links* links = s->links;
  Seconds seconds = links->collective == RING               ? ring(s, order)
                    : links->collective == HALVING_DOUBLING ? halving_doubling(s, order)
                                                            : tree(s, order);
  if (links->keep_first) seconds.torn = torn_groups(links, order);
  return seconds;
}

double rw_order_seconds(const Links* links, const int32_t* order) {
  Scratch s = {0};
  double seconds = -1;
  if (scratch_make(&s, links)) seconds = seconds_of(&s, order).slowest;
  scratch_free(&s);
  return seconds;
}

static void exchange(int32_t* order, int32_t a, int32_t b) {
  const int32_t swap = order[a];
  order[a] = order[b], order[b] = swap;
}

static void reverse(int32_t* order, int32_t a, int32_t b) {
  while (a < b) exchange(order, a++, b--);
}

// The next permutation in lexical order, from place `first` on; 0 after the last one.
static int next_permutation(int32_t* order, int32_t first, int32_t hosts) {
  int32_t k = hosts - 2, swap = hosts - 1;
  while (k >= first && order[k] >= order[k + 1]) k--;
  if (k < first) return 0;
  while (order[swap] <= order[k]) swap--;
  exchange(order, k, swap);
  reverse(order, k + 1, hosts - 1);
  return 1;
}

double rw_order_exact(const Links* links, int32_t* order) {
  Scratch s = {0};
  int32_t trial[MAX_EXACT];
  double best = -1;
  if (links->hosts <= MAX_EXACT && scratch_make(&s, links)) {
    Seconds seconds = seconds_of(&s, order);
    best = seconds.torn ? INFINITY : seconds.slowest;
    for (int32_t k = 0; k < links->hosts; k++) trial[k] = k;
    do {
      seconds = seconds_of(&s, trial);
      if (!seconds.torn && seconds.slowest < best * (1 - MIN_GAIN)) {
        best = seconds.slowest;
        memcpy(order, trial, sizeof(int32_t) * (size_t)links->hosts);
      }
      // A ring may begin anywhere.
    } while (next_permutation(trial, links->keep_first || links->collective == RING, links->hosts));
  }
  scratch_free(&s);
  return best;
}

static void change(uint64_t* random, int32_t* order, int32_t first, int32_t hosts) {
  int32_t a = first + random_below(random, hosts - first), b = first + random_below(random, hosts - first);
  const double kind = random_uniform(random);
  if (kind < 0.4) {
    exchange(order, a, b);
  } else if (kind < 0.7) {
    reverse(order, a < b ? a : b, a < b ? b : a);
  } else {
    const int32_t moved = order[a];
    for (; a < b; a++) order[a] = order[a + 1];
    for (; a > b; a--) order[a] = order[a - 1];
    order[b] = moved;
  }
}

static double energy(Seconds seconds) { return (1 + seconds.torn) * seconds.slowest + SMOOTH * seconds.mean; }

double rw_order_anneal(const Links* links, const Effort* effort, int32_t* order) {
  const size_t bytes = sizeof(int32_t) * (size_t)links->hosts;
  const double begin_s = now_s();
  Scratch s = {0};
  int32_t *current = malloc(bytes), *trial = malloc(bytes);
  uint64_t random = effort->seed;
  double best = -1;
  if (current && trial && scratch_make(&s, links)) {
    Seconds seconds = seconds_of(&s, order);
    double present = energy(seconds), share = 0, heat = 0;
    const double begin = present;
    best = seconds.torn ? INFINITY : seconds.slowest;
    memcpy(current, order, bytes);
    for (int64_t move = 0; move < effort->moves && share <= 1; move++) {
      if (move % CHECK_EVERY == 0) {  // progress by moves or by time, whichever is further
        share = greater((double)move / (double)effort->moves, (now_s() - begin_s) / effort->limit_s);
        heat = begin * effort->hot * pow(effort->cold / effort->hot, share);
      }
      memcpy(trial, current, bytes);
      change(&random, trial, links->keep_first, links->hosts);
      seconds = seconds_of(&s, trial);
      const double next = energy(seconds);
      if (next > present && random_uniform(&random) >= exp((present - next) / heat)) continue;
      memcpy(current, trial, bytes);
      present = next;
      if (!seconds.torn && seconds.slowest < best * (1 - MIN_GAIN)) {
        best = seconds.slowest;
        memcpy(order, trial, bytes);
      }
    }
  }
  free(current), free(trial);
  scratch_free(&s);
  return best;
}
