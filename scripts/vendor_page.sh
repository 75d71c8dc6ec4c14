#!/usr/bin/env bash
# Fetches the libraries of the pages from npm again, and checks each file's SHA-256: scripts/vendor_page.sh [--update]
#   --update  after a version below was changed: writes the files and their sums, instead of comparing with the files that are there
set -euo pipefail
cd "$(dirname "$0")/../nmoe"
packages=(marked@18.2.1 dompurify@3.5.0 katex@0.19.1 uplot@1.6.32)
pages=(serve dashboard)

made="$(mktemp -d)"
trap 'rm -r "$made"' EXIT
mkdir -p "$made/serve/fonts" "$made/dashboard"
take() { # page, package, its file, our name
    cp "$made/$2/package/$3" "$made/$1/$4"
}
for package in "${packages[@]}"; do
    name="${package%@*}"
    mkdir "$made/$name"
    tar -xz -C "$made/$name" -f <(cd "$made" && cat "$(npm pack --silent "$package")")
done
for name in marked dompurify katex; do
    take serve "$name" LICENSE "$name.LICENSE"
done
take serve marked lib/marked.esm.js marked.esm.js
take serve dompurify dist/purify.min.js purify.min.js
take serve katex dist/katex.min.js katex.min.js
take serve katex dist/katex.min.css katex.min.css
cp "$made"/katex/package/dist/fonts/*.woff2 "$made/serve/fonts"
take dashboard uplot LICENSE uplot.LICENSE
take dashboard uplot dist/uPlot.iife.min.js uPlot.iife.min.js
take dashboard uplot dist/uPlot.min.css uPlot.min.css

for page in "${pages[@]}"; do
    (cd "$made/$page" && find . -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)
    here="$page/page/vendored"
    if [ "${1:-}" = --update ]; then
        rm -rf "${here:?}"/*
        cp -r "$made/$page/." "$here"
    else
        diff "$here/SHA256SUMS" "$made/$page/SHA256SUMS"
    fi
    (cd "$here" && sha256sum --check --quiet SHA256SUMS)
    echo "$page: $(wc -l <"$here/SHA256SUMS") files are as npm has them"
done
