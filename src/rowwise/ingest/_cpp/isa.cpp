// The kernel table of one instruction set. CMake compiles this file once per set, with its flags and -DISA=.
#include "bags.h"
#include "hash.h"
#include "numbers.h"

namespace rowwise_ingest::ISA {

#define TEXT(x) #x
#define NAME(x) TEXT(x)
extern const Kernels kernels;
const Kernels kernels{NAME(ISA), count, bags, map, text, buckets<float>, buckets<double>, fill, turn};

}  // namespace rowwise_ingest::ISA
