// All kernels for one instruction set. CMake compiles this file once for each, with its flags and -DISA=.
#include "apply.h"
#include "copy.h"
#include "dots.h"
#include "idmap_rows.h"
#include "ids.h"
#include "interact.h"
#include "layers.h"
#include "lookup.h"
#include "pairs.h"
#include "quantise.h"
#include "random.h"

namespace rowwise::ISA {

#define TEXT(x) #x
#define NAME(x) TEXT(x)
extern const Kernels kernels;
const Kernels kernels{NAME(ISA),      pool,   gather, weight_grad, touch,        rewrite,       uniform,
                      pack,           unpack, pack4,  unpack4,     keep_largest, apply,         optimizer,
                      span,           rank,   route,  stream_copy, interact,     interact_grad, pair_sums,
                      pair_sums_grad, dots,   layer,  map_ids};

}  // namespace rowwise::ISA
