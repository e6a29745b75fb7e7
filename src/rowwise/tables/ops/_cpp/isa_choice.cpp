#include <atomic>
#include <stdexcept>
#include <vector>

#include "isa.h"

namespace rowwise {
namespace {

std::vector<const Kernels*> usable() {  // narrowest first
  std::vector<const Kernels*> sets{&base::kernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  if (wide) sets.push_back(&avx2::kernels);
  if (wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    sets.push_back(&avx512::kernels);
#endif
  return sets;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> choice{usable().back()};
  return choice;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }
std::string isa_name() { return kernels().name; }

void limit_isa(std::string name) {
  for (const Kernels* set : usable())
    if (name == set->name) {
      chosen() = set;
      return;
    }
  throw std::runtime_error("rowwise: this processor has no " + name);
}

}  // namespace rowwise
