#!/usr/bin/env bash
# Makes sure that there is a Redis server, which slow tests and a benchmark start; its own service is not used.
exec "$(dirname "$0")/debian.sh" redis-server redis-server
