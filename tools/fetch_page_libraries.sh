#!/usr/bin/env bash
# Fetches the libraries of the web page again, at pinned versions, from npm into scripts/serve/page/vendor: no other step
# needs a network or npm. To take a newer one: change its version here, run this, run tests/scripts/serve/test_page.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../scripts/serve/page/vendor"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() { # name, version: unpacks the package into $work/name
    mkdir "$work/$1"
    tar -xzf "$work/$(npm pack --silent --pack-destination "$work" "$1@$2")" -C "$work/$1" --strip-components 1
}

fetch marked 18.2.1
fetch dompurify 3.4.18
fetch katex 0.19.1
fetch uplot 1.6.32

cp "$work/marked/lib/marked.umd.js" marked.js
cp "$work/dompurify/dist/purify.min.js" purify.js
cp "$work/katex/dist/katex.min.js" katex/katex.js
cp "$work/katex/dist/katex.min.css" katex/katex.css
cp "$work"/katex/dist/fonts/*.woff2 katex/fonts/
cp "$work/uplot/dist/uPlot.iife.min.js" uPlot.js
cp "$work/uplot/dist/uPlot.min.css" uPlot.css
cp "$work/marked/LICENSE" marked.LICENSE
cp "$work/dompurify/LICENSE" purify.LICENSE
cp "$work/katex/LICENSE" katex/LICENSE
cp "$work/uplot/LICENSE" uPlot.LICENSE
