#!/usr/bin/env bash
# Makes sure that there is a chromium, in which the slow tests look at reports: tools/browser.sh
exec "$(dirname "$0")/debian.sh" chromium chromium chromium-browser google-chrome
