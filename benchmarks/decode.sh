#!/usr/bin/env bash
# Times decoding of nmoe against transformers' generate, vLLM on a CPU and a bare loop. nmoe, transformers and the loop run in
# .venv, vLLM in an environment of its own, .venv-vllm, made where that side is chosen; safe to run twice.
# OMP_NUM_THREADS (default 2) sets the threads of every side; arguments: see --help.
set -euo pipefail
cd "$(dirname "$0")/.."

source benchmarks/environments.sh
require_python
for argument in "$@"; do
    case "$argument" in -h | --help) exec "$PYTHON" benchmarks/decode_workload.py --help ;; esac
done
SIDES="$("$PYTHON" benchmarks/decode_workload.py "$@")" # ends here, before anything is installed, where they are wrong

source scripts/environment.sh
prepare_environment "$PWD" report
case " $SIDES " in *" vllm "*)
    prepare_vllm "$PWD"
    ;;
esac

quiet_sides
exec python benchmarks/decode.py "$@"
