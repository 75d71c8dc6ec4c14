#!/usr/bin/env bash
# Times a SFT step of nmoe against TRL's in an environment of its own, .venv-trl; safe to run twice.
# OMP_NUM_THREADS (default 2) sets the threads of every side; arguments go to sft_vs_trl.py (see --help).
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/environments.sh
prepare_trl
quiet_sides
exec "$PYTHON_TRL" benchmarks/sft_vs_trl.py "$@"
