#!/usr/bin/env bash
# Installs Chromium and its driver, which the tests of the web page use; without them these tests are skipped. Needs root
# and apt (Debian); elsewhere it says what to install. A failure ends in one line and stops nothing.
set -uo pipefail

has_chromium() {
    command -v chromedriver >/dev/null && { command -v /usr/lib/chromium/chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null
}

if has_chromium; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium and chromium-driver"
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install -y -qq --no-install-recommends)
    # the headless shell, which older distributions lack, takes a quarter less time
    { apt-get update -qq && "${install[@]}" chromium chromium-driver && "${install[@]}" chromium-headless-shell; } >/dev/null 2>&1 || true
fi
has_chromium || echo "no Chromium with chromedriver here, so the tests of the web page are skipped; as root: apt-get install chromium chromium-driver" >&2
exit 0
