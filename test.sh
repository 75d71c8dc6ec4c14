#!/usr/bin/env bash
# Everything that has to hold before a change lands: style, types, tests. Installs into .venv.
#   ./test.sh                    all of it
#   ./test.sh tests/model -k moe arguments go to pytest
#   OMP_NUM_THREADS=2 ./test.sh  with two threads
# One thread by default: small operations slow down badly when threads outnumber free cores.
set -euo pipefail
root="$(cd "$(dirname "$0")" && pwd)"
. "$root/scripts/environment.sh"
prepare_environment "$root" dev
cd "$root"
# With bytecode on disk: without it, each of the hundred processes that tests start compiles the modules it imports once more.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
echo "== ruff"
ruff check .
ruff format --check .
echo "== mypy"
mypy
echo "== pytest (tests that this machine cannot run are listed with their reason at the end)"
# All of them in as many processes as there are cores, at most four, a file's tests by one of them; what was chosen in one, as a debugger needs.
[ $# -gt 0 ] || set -- -n logical --maxprocesses 4 --dist loadfile
exec python -m pytest -rs --durations=10 "$@"
