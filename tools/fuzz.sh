#!/usr/bin/env bash
# Fuzzes the planner's library and the caches with clang's libFuzzer, under the address and undefined-behaviour
# sanitizers: tools/fuzz.sh [-OPTION=VALUE ...] [NAME ...], options of libFuzzer and fuzzers of tests/fuzz; by default
# all, one after the other. Each starts from its seeds; what it finds on the way, and what fails, is in build/fuzz.
#
# A failure is run again with: build/fuzz/NAME build/fuzz/crash-...
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(uname)" != Linux ]; then
  echo "fuzz: skipped, as it needs Linux" >&2
  exit 0
fi
tools/debian.sh "clang libclang-rt-dev llvm" clang++

folder=build/fuzz
flags=(-g -O1 -fno-omit-frame-pointer -Wall -Wextra -Wno-psabi -fsanitize=address,undefined
  -fno-sanitize-recover=undefined)
declare -A sources=(
  [plan]="planning/planner/_c/anneal.c planning/planner/_c/greedy.c planning/planner/_c/neuroshard.c planning/planner/_c/order.c planning/planner/_c/state.c"
  [tier]="tables/store/_cpp/tier.cpp"
  [caches]="tables/store/_c/simulate.c tables/store/_cpp/shared_cache.cpp"
)
options=() names=()
for word in "$@"; do
  case $word in -*) options+=("$word") ;; *) names+=("$word") ;; esac
done
[ "${#names[@]}" -gt 0 ] || names=(plan tier caches)

build() {  # NAME
  local source object objects=()
  for source in ${sources[$1]}; do
    object=$folder/$1-$(basename "$source").o
    case $source in *.c) compile=(clang -std=gnu11) ;; *) compile=(clang++ -std=gnu++17) ;; esac
    "${compile[@]}" "${flags[@]}" -fsanitize=fuzzer-no-link -c "src/rowwise/$source" -o "$object"
    objects+=("$object")
  done
  clang++ -std=gnu++17 "${flags[@]}" -fsanitize=fuzzer "tests/fuzz/$1.cpp" "${objects[@]}" -lpthread -o "$folder/$1"
}

for name in "${names[@]}"; do
  found=$folder/$name.found log=$folder/$name.log
  rm -rf "$found"
  mkdir -p "$found"
  build "$name"
  "$folder/$name" -artifact_prefix="$folder/" -max_len=1000 -len_control=0 -timeout=60 -rss_limit_mb=4096 \
    -print_funcs=0 -print_final_stats=1 "${options[@]}" "$found" "tests/fuzz/seeds/$name" >"$log" 2>&1 ||
    { tail -60 "$log"; echo "fuzz: $name has failed: $log" >&2; exit 1; }
  echo "$name: $(grep -Eo 'DONE +cov: [0-9]+' "$log"), $(grep -Eo 'average.*' "$log"), $(grep -Eo '[0-9]+ inputs.*' "$log")"
done
