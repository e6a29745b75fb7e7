// Copying past the caches: a copy too large to stay in them should not read the memory that it overwrites.
//
// Included by isa.cpp only.
#pragma once
#include <algorithm>
#include <cstring>

#include "simd.h"

namespace rowwise::ISA {
namespace {

void stream_copy(void* out, const void* in, int64_t bytes) {
  constexpr int64_t line = 64, lanes = LANES;
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(in);
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & (line - 1));
  std::memcpy(to, from, size_t(head));
  to += head, from += head, bytes -= head;
  for (; bytes >= line; to += line, from += line, bytes -= line)
    for (int64_t k = 0; k < line / 4; k += lanes)
      Vec<Wide>::stream(reinterpret_cast<float*>(to) + k, Vec<Wide>::load(reinterpret_cast<const float*>(from) + k));
  std::memcpy(to, from, size_t(bytes));
  stream_fence();
}

}  // namespace
}  // namespace rowwise::ISA
