#!/usr/bin/env bash
# Makes the environment that the Makefile runs everything in: tools/setup.sh PYTHON VENV.
#
# Needs only a Python >= 3.11 with venv, a C++ compiler, and whatever package sources pip is configured with;
# cmake and ninja come from pip. A torch that PYTHON already has is used and left as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_pin=2.13.0   # installed where there is no torch yet
python=$1
venv=$2

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

# Prints the version of a torch >= 2.11; fails if there is none. Does not import it, which would take seconds.
torch_of() {
  "$1" - <<'PY'
import re
from importlib.metadata import PackageNotFoundError, version

try:
    found = version("torch")
except PackageNotFoundError:
    raise SystemExit(1)
if tuple(map(int, re.findall(r"\d+", found)[:2])) < (2, 11):
    raise SystemExit(1)
print(found)
PY
}

check_tools() {
  command -v "$python" >/dev/null || fail "no $python: install Python >= 3.11, or say where it is: make PYTHON=/path/to/python3"
  "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version 2>&1) is too old; expected Python >= 3.11: make PYTHON=/path/to/python3"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python has no venv module; on Debian and Ubuntu: apt install python3-venv"
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    fail "no C++ compiler; on Debian and Ubuntu: apt install g++, on macOS: xcode-select --install"
}

make_venv() {
  if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return  # a change of pyproject.toml only needs what is new in it
  fi
  if ! found=$(torch_of "$python"); then
    say "making $venv"
    "$python" -m venv --clear "$venv"
    return
  fi
  say "making $venv, which uses the torch $found that $python has"
  "$python" -m venv --clear --system-site-packages "$venv"
  if ! torch_of "$venv/bin/python" >/dev/null; then
    # $python is itself of a virtual environment, whose packages --system-site-packages leaves out.
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages-of-python.pth"
  fi
}

install_torch() {
  torch_of "$venv/bin/python" >/dev/null && return
  say "installing torch $torch_pin"
  if [ "$(uname)" = Darwin ]; then
    "${pip[@]}" "torch==$torch_pin"
  else  # the CPU build, from the configured package sources if they have it
    "${pip[@]}" "torch==$torch_pin+cpu" 2>/dev/null ||
      "${pip[@]}" "torch==$torch_pin+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
      fail "no torch $torch_pin+cpu; install any torch >= 2.11 for $python yourself and start again"
  fi
}

install_dependencies() {
  say "installing what running and building need"
  # Without the project itself: that is built apart, each time its sources change.
  "$venv/bin/python" tools/requirements.py dependencies build >"$venv/requirements.txt"
  "${pip[@]}" -r "$venv/requirements.txt"
}

check_tools
make_venv
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
install_torch
install_dependencies
