#!/usr/bin/env bash
# Builds the native operators with the address and undefined-behaviour sanitizers and runs their tests:
# tools/sanitize.sh PYTHON [pytest arguments]. Everything it makes is in build/sanitize.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")  # absolute, and still the one of its environment
shift
folder=build/sanitize
site=$PWD/$folder/site
PATH=$(dirname "$python"):$PATH  # cmake and ninja

if [ "$(uname)" != Linux ] || ! command -v g++ >/dev/null; then
  echo "sanitize: skipped, as it needs Linux and g++" >&2
  exit 0
fi

mkdir -p "$folder"
cmake -S . -B "$folder" -G Ninja -DROWWISE_SANITIZE=ON -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE="$python" \
  >"$folder/configure.log" || { cat "$folder/configure.log"; exit 1; }
cmake --build "$folder"
rm -rf "$site"
mkdir -p "$site"
cp -r src/rowwise "$site"
cmake --install "$folder" --prefix "$site" >/dev/null

# -S keeps the editable installation of the ordinary build away; without it the search path has to be spelled out.
packages=$("$python" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep=":")')
export PYTHONPATH=$site:$packages OMP_WAIT_POLICY=passive
run() {
  LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 "$python" -S "$@"
}

run - "$site" <<'PY'
import sys
from pathlib import Path

import numpy as np
import rowwise.tables.ops
from rowwise.tables.ids import native as hashing
from rowwise.ingest import native as ingest
from rowwise.base.library import find_library
from rowwise.tables.ops.native import LIBRARY
from rowwise.tables.store import simulate as caches

ingest.library.rw_ingest_isa()
hashing.library.rw_hashing_isa()
caches.simulate(caches.Trace.of(np.zeros(1, np.int64)), 1, "lru")
for library in map(find_library, (LIBRARY, ingest.library.name, hashing.library.name, caches.library.name)):
    inside = library.is_relative_to(sys.argv[1])
    made = library.read_bytes()
    assert inside and b"__asan_" in made and b"__ubsan_" in made, f"not sanitized: {library}"
    assert str(library) in Path("/proc/self/maps").read_text(), f"not loaded: {library}"
    print(f"sanitize: testing {library}")
PY
mapfile -t tests <tests/native_tests.txt
[ ! -e tests/test_bad_input.py ] || tests+=(tests/test_bad_input.py)
# sys: the sanitizers write past Python. Triton's machine code is for GPUs, and compiled by none of these libraries.
run -m pytest --capture=sys --ignore=tests/tables/ops/test_triton.py "${tests[@]}" "$@"
