// Which instruction set to use: the widest this processor has, chosen once; tests may ask for a narrower one.
#pragma once
#include <string>

#include "kernels.h"

namespace rowwise {

const Kernels& kernels();
std::string isa_name();
void limit_isa(std::string name);

}  // namespace rowwise
