#!/usr/bin/env bash
# Makes sure that one of some programs is on the PATH: tools/debian.sh PACKAGES PROGRAM...
#
# Installs Debian's packages, words of one argument, with apt where that is possible, and says what to do where it is not.
set -euo pipefail
package=$1
shift

say() { echo "$package: $*" >&2; }

for name in "$@"; do
  command -v "$name" >/dev/null && exit 0
done
if ! command -v apt-get >/dev/null; then
  say "no $1, and no apt-get to install it with: install one of $* so that it is on the PATH"
  exit 1
fi
if [ "$(id -u)" != 0 ]; then
  say "no $1: sudo apt-get install --no-install-recommends $package"
  exit 1
fi
say "installing $package"
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $package >/dev/null ||
  { say "apt-get could not install $package; install one of $* so that it is on the PATH"; exit 1; }
