#!/usr/bin/env bash
# Fetches the libraries of the chat page from npm again, and checks each file's SHA-256: scripts/vendor_page.sh [--update]
#   --update  after a version below was changed: writes the files and their sums, instead of comparing with the files that are there
set -euo pipefail
cd "$(dirname "$0")/../nmoe/serve/page/vendored"
packages=(marked@18.2.1 dompurify@3.5.0 katex@0.19.1)

made="$(mktemp -d)"
trap 'rm -r "$made"' EXIT
mkdir "$made/out" "$made/out/fonts"
take() { # package, its file, our name
    cp "$made/$1/package/$2" "$made/out/$3"
}
for package in "${packages[@]}"; do
    name="${package%@*}"
    mkdir "$made/$name"
    tar -xz -C "$made/$name" -f <(cd "$made" && cat "$(npm pack --silent "$package")")
    take "$name" LICENSE "$name.LICENSE"
done
take marked lib/marked.esm.js marked.esm.js
take dompurify dist/purify.min.js purify.min.js
take katex dist/katex.min.js katex.min.js
take katex dist/katex.min.css katex.min.css
cp "$made"/katex/package/dist/fonts/*.woff2 "$made/out/fonts"
(cd "$made/out" && find . -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)

if [ "${1:-}" = --update ]; then
    rm -rf ./*
    cp -r "$made/out/." .
else
    diff SHA256SUMS "$made/out/SHA256SUMS"
fi
sha256sum --check --quiet SHA256SUMS
echo "${packages[*]}: $(wc -l <SHA256SUMS) files are as npm has them"
