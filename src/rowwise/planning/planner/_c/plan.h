// The planner's inner loop: a problem as flat arrays, and searches over it. Plain C, no tensors, no globals.
//
// A *piece* goes to a *unit*: a rank, all ranks of a host, or all ranks; it adds the same loads, link seconds and
// bytes to each rank of the unit. Each item has options, each option pieces; a placement takes one option of each item.
// See [Note: Cost] in rowwise/planning/perf/cost.py for the cost of a placement.

#ifndef ROWWISE_PLAN_H
#define ROWWISE_PLAN_H

#include <stdint.h>

enum { MAX_LOADS = 128, MAX_HINGES = 256, MAX_GROUPS = 8, MAX_TIERS = 3, NO_UNIT = -1 };
enum { UNIT_RANK = 0, UNIT_HOST = 1, UNIT_ALL = 2 };

typedef struct {
  int32_t items, options, pieces, hosts, devices, loads, tiers, groups;
  const int32_t* item_begin;    // items + 1, into options
  const int32_t* option_begin;  // options + 1, into pieces
  const uint8_t* option_unit_kind;
  const double* piece_load;   // pieces x loads
  const double* piece_link;   // pieces: seconds
  const double* piece_bytes;  // pieces x tiers
  const double* limit;        // tiers
  const int32_t* item_rule;   // items: a row of `allowed`, or -1
  const uint8_t* allowed;     // rules x units
  const int32_t* home;        // pieces or NULL: the unit where a piece's rows are now
  const double* stay_bytes;   // pieces: bytes that need not move if it stays there
  const int32_t* group_end;   // groups
  const double* group_power;  // groups
  double constant;            // phi of no load
  int32_t hinges;
  const double* hinge_weight;  // loads x hinges
  const double* hinge_offset;  // hinges
  const double* hinge_out;     // hinges
} Problem;

typedef struct {
  uint64_t seed;
  int64_t moves;
  double hot, cold;    // temperatures, as shares of the start's cost
  double limit_s;      // of wall time
  double smooth;       // share of a smooth maximum in the annealed cost
  double bytes_price;  // seconds that a byte moved from its home costs
  int32_t timed;       // 1: cooling also follows the time, so that it ends before the limit does
} Effort;

typedef struct {
  double cost, over;  // of the best placement: seconds; bytes over the limits, as a share of them, or 0
  int64_t moves;      // tried
  int32_t stopped;    // by time
} Found;

// Loads of one rank to seconds.
double rw_phi(const Problem* problem, const double* load);

// Cost of a placement, and bytes over the limits as a share of them. `unit` has a unit for each piece, or NO_UNIT.
double rw_cost(const Problem* problem, const int32_t* unit, double* over);

// Improves a placement in place: `choice` has an option for each item, `unit` a unit for each piece.
Found rw_anneal(const Problem* problem, const Effort* effort, int32_t* choice, int32_t* unit);

// Places pieces in order, each where `measure` is least afterwards: 0 phi of the rank, 1 the sum of `key`, 2 the
// largest of phi, link seconds and bytes relative to `scale` (2 + tiers numbers). A rank's link seconds stay under
// `link_limit` where they can. Returns the first piece that fits nowhere, or `count`.
enum { BY_PHI = 0, BY_KEY = 1, BY_SHARE = 2 };
int32_t rw_greedy(const Problem* problem, const int32_t* order, int32_t count, int32_t measure, const double* key,
                  const double* scale, double link_limit, int32_t* unit);

// NeuroShard's search: beam over halvings of columns, greedy placement at several bounds on dims inside.
typedef struct {
  int32_t beam, candidates, depth, grid;
  double widest;  // the loosest bound, as a multiple of the mean
} Neuroshard;
double rw_neuroshard(const Problem* problem, const Neuroshard* how, const int32_t* halving, int32_t levels,
                     int32_t* out_piece, int32_t* out_rank, int32_t* out_count);

// A network of hosts, and the collective whose time an order of hosts is searched for; see [Note: Orders of hosts].
typedef struct {
  int32_t hosts, groups, collective;  // ring, halving and doubling, or tree
  int32_t keep_first;                 // 1: host 0 stays first, and the hosts of each group stay together
  const double *latency, *rate;       // hosts x hosts, [from][to]
  const int32_t* group;               // of each host
  const double* uplink;               // groups: bytes a second each way
  double size_bytes;
} Links;

// Seconds of the collective with `order[k]` as the host that comes k-th; negative without memory, as of the next two.
double rw_order_seconds(const Links* links, const int32_t* order);

// The best order of at most 8 hosts, in place: every order is tried, and the start kept unless another is better.
double rw_order_exact(const Links* links, int32_t* order);

// A better order, in place.
double rw_order_anneal(const Links* links, const Effort* effort, int32_t* order);

#endif
