#!/usr/bin/env bash
# Builds the native libraries for ARM and runs their tests on an emulated ARM processor, with torch's ARM wheel:
# tools/arm.sh PYTHON [pytest arguments]. Everything it makes is in build/arm. Needs Debian or Ubuntu on x86-64.
#
# Says whether results are right on ARM. How fast they are there, an emulator cannot say.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")  # absolute, and still the one of its environment
shift
here=$PWD/build/arm
root=$here/root        # Debian's Python for ARM
packages=$here/packages  # those with machine code, for ARM; the others are of $python
site=$here/site        # rowwise
PATH=$(dirname "$python"):$PATH  # cmake and ninja

say() { echo "arm: $*" >&2; }

if ! command -v apt-get >/dev/null || [ "$(uname -m)" != x86_64 ]; then
  say "skipped, as it needs Debian or Ubuntu on x86-64"
  exit 0
fi
if ! command -v aarch64-linux-gnu-g++ >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
  [ "$(id -u)" = 0 ] || { say "first: sudo apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
  say "installing a compiler and an emulator"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends g++-aarch64-linux-gnu qemu-user >/dev/null
fi

build() {
  mkdir -p "$here/libraries"
  cmake -S . -B "$here/libraries" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" -DPython_EXECUTABLE="$python" \
    >"$here/configure.log" || { cat "$here/configure.log"; exit 1; }
  cmake --build "$here/libraries" >"$here/build.log" || { cat "$here/build.log"; exit 1; }
  rm -rf "$site"
  mkdir -p "$site"
  cp -r src/rowwise "$site"
  cmake --install "$here/libraries" --prefix "$site" >/dev/null
}

# apt-get with lists and packages of its own: the system's stay as they are.
arm_apt() { APT_CONFIG=$here/apt.conf apt-get -qq "$@"; }

install_python() {
  [ ! -e "$here/python" ] || return 0
  say "installing Debian's Python for ARM"
  mkdir -p "$here"/lists/partial "$here"/debs "$root"
  cat >"$here/apt.conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
Dir::State::lists "$here/lists";
Dir::State::status "/dev/null";
Dir::Cache "$here";
CONF
  arm_apt update
  name=$(APT_CONFIG=$here/apt.conf apt-cache depends python3-minimal | sed -n 's/.*: \(python3\.[0-9]*\)-minimal$/\1/p' | head -1)
  (cd "$here/debs" && arm_apt download "$name-minimal" "lib$name-minimal" "lib$name-stdlib" libc6 libgcc-s1 libstdc++6 \
    zlib1g libexpat1 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 libuuid1)
  for deb in "$here"/debs/*.deb; do dpkg -x "$deb" "$root"; done
  # What torch reads of a processor; an emulator would show this machine's.
  mkdir -p "$root/proc"
  for cpu in 0 1; do
    mkdir -p "$root/sys/devices/system/cpu/cpu$cpu/regs/identification"
    echo 0x00000000413fd0c1 >"$root/sys/devices/system/cpu/cpu$cpu/regs/identification/midr_el1"
    printf 'processor\t: %d\nFeatures\t: %s\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n\n' \
      "$cpu" "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
  done >"$root/proc/cpuinfo"
  echo "$name" >"$here/python"
}

install_packages() {
  [ ! -e "$packages/done" ] || return 0
  say "installing packages for ARM"
  version=$(sed s/python// "$here/python")
  torch=$("$python" -c 'from importlib.metadata import version; print(version("torch").split("+")[0])')
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --target "$packages" \
    --python-version "$version" --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    "torch==$torch" numpy scipy msgspec pyarrow pyyaml hypothesis
  "$python" tools/stand_ins.py "$packages/torch" "$here/stand_ins"
  touch "$packages/done"
}

# Python on ARM, also for processes that tests start.
write_runner() {
  cat >"$here/run" <<RUN
#!/bin/sh
exec qemu-aarch64 -L "$root" -E LD_LIBRARY_PATH="$here/stand_ins:$packages/torch/lib" \
  -E PYTHONPATH="$site:$packages:$others:\$PYTHONPATH" -E OMP_NUM_THREADS=2 "$root/usr/bin/$(cat "$here/python")" -S "\$@"
RUN
  chmod +x "$here/run"
}

build
install_python
install_packages
others=$("$python" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep=":")')
write_runner
"$here/run" - "$here/run" "$@" <<'PY'
import platform
import sys
from pathlib import Path

import pytest

import rowwise.tables.ops

sys.executable = sys.argv[1]
assert platform.machine() == "aarch64"
assert "build/arm/site" in rowwise.tables.ops.__file__
tests = Path("tests/native_tests.txt").read_text().split()
# In the emulator /proc is a folder like any other; Triton compiles where there is an x86-64 processor.
left = ["--ignore=tests/tables/ops/test_triton.py", "--deselect=tests/tables/store/test_disk_rows.py::test_folders_that_cannot_be_used"]
chosen = ["-m", "not slow and not dist and not gpu", *left]
sys.exit(pytest.main([*chosen, *tests, *sys.argv[2:]]))
PY
