#!/usr/bin/env bash
# Times a GRPO step of nmoe against TRL's in an environment of its own, .venv-trl; safe to run twice.
# OMP_NUM_THREADS (default 2) sets the threads of every side; arguments go to grpo_vs_trl.py (see --help).
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/environments.sh
prepare_trl
quiet_sides
exec "$PYTHON_TRL" benchmarks/grpo_vs_trl.py "$@"
