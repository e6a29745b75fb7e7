// The inner loops for one instruction set. CMake compiles this file once for each, with its flags and -DISA=.
#include "blocks.h"

namespace rowwise_hashing::ISA {

#define TEXT(x) #x
#define NAME(x) TEXT(x)
extern const Kernels kernels;
const Kernels kernels{NAME(ISA), nearest, join, weigh};

}  // namespace rowwise_hashing::ISA
