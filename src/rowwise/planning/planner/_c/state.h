// A placement that is updated piece by piece: sums of each rank, and trees of their maxima.

#ifndef ROWWISE_PLAN_STATE_H
#define ROWWISE_PLAN_STATE_H

#include <stddef.h>

#include "plan.h"

typedef struct {
  int32_t begin, end;
} Ranks;

typedef struct {
  const Problem* problem;
  int32_t world, units, stride, leaves;
  double* sum;                     // world x stride: loads, link seconds, bytes by tier
  double *phi, *over;              // of each rank
  double *top_phi, *top_link;      // trees of maxima: leaf r at leaves + r
  double all_over;                 // the sum of `over`
  double phi_scale, link_scale;    // divisors of the 16th powers, against overflow
  double phi_power, link_power;    // sums over ranks of phi and link seconds to the 16th power: a smooth maximum
  int32_t* unit;                   // of each piece, or NO_UNIT
  int32_t* slot;                   // of each piece in its unit's list
  int32_t **list, *length, *room;  // pieces of each unit
  // Ranks that the change has touched, and their state before it.
  int32_t *touched, touched_count, *stamp, now;
  double* kept;  // world x (stride + 2)
  double kept_over, kept_phi_power, kept_link_power;
  int64_t renewals;  // of ranks: the work done
} State;

int state_make(State* state, const Problem* problem);
void state_free(State* state);
Ranks unit_ranks(const Problem* problem, int32_t unit);
int unit_allowed(const Problem* problem, int32_t item, int32_t unit);

void state_begin(State* state);  // a change
void state_put(State* state, int32_t piece, int32_t unit);
void state_take(State* state, int32_t piece);
void state_list(State* state, int32_t piece, int32_t unit);  // the lists alone
void state_unlist(State* state, int32_t piece);
void state_undo_sums(State* state);  // since state_begin; lists are the caller's to restore

void state_scale(State* state, double phi, double link);  // powers anew, relative to these

static inline double power16(double x) {
  x *= x, x *= x, x *= x;
  return x * x;
}

static inline double state_cost(const State* state) { return state->top_phi[1] + state->top_link[1]; }

#endif
