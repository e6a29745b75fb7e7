#!/usr/bin/env bash
# Makes sure that there is a promtool, which slow tests ask about metrics and alerting rules: tools/promtool.sh FOLDER
#
# Takes this program alone out of Debian's package prometheus, into FOLDER: no service is installed, and no root is needed.
set -euo pipefail
folder=$(realpath "$1")

command -v promtool >/dev/null && exit 0
[ -x "$folder/promtool" ] && exit 0
if ! command -v apt-get >/dev/null; then
  echo "prometheus: no promtool, and no apt-get to fetch it with: put it on the PATH, or into $folder" >&2
  exit 1
fi
echo "prometheus: fetching promtool" >&2
package=$(mktemp -d)
trap 'rm -r "$package"' EXIT
cd "$package"
apt-get -qq download prometheus 2>/dev/null || { apt-get -qq update && apt-get -qq download prometheus; }
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 -C "$folder" ./usr/bin/promtool
