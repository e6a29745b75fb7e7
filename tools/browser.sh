#!/usr/bin/env bash
# Makes sure that there is a chromium, in which the slow tests look at reports: tools/browser.sh
#
# Installs Debian's with apt where that is possible, and says what to do where it is not.
set -euo pipefail

say() { echo "browser: $*" >&2; }

for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if ! command -v apt-get >/dev/null; then
  say "no chromium, and no apt-get to install it with: install chromium or google-chrome so that it is on the PATH"
  exit 1
fi
if [ "$(id -u)" != 0 ]; then
  say "no chromium: sudo apt-get install --no-install-recommends chromium"
  exit 1
fi
say "installing chromium"
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null ||
  { say "apt-get could not install chromium; install one so that it is on the PATH"; exit 1; }
