#!/usr/bin/env bash
# Times decoding of nmoe against transformers' generate, vLLM on a CPU and a bare loop. nmoe, transformers and the loop run in
# .venv, vLLM in an environment of its own, .venv-vllm, made where that side is chosen; safe to run twice.
# OMP_NUM_THREADS (default 2) sets the threads of every side; arguments: see --help.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "decode.sh: needs Python 3.11 or newer, found $("$PYTHON" --version); set PYTHON to one" >&2
    exit 2
}
for argument in "$@"; do
    case "$argument" in -h | --help) exec "$PYTHON" benchmarks/decode_arguments.py --help ;; esac
done
SIDES="$("$PYTHON" benchmarks/decode_arguments.py "$@")" # ends here, before anything is installed, where they are wrong

source scripts/environment.sh
prepare_environment "$PWD" report
case " $SIDES " in *" vllm "*)
    source benchmarks/vllm_environment.sh
    prepare_vllm "$PWD"
    ;;
esac

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" MKL_NUM_THREADS="${OMP_NUM_THREADS:-2}"
# Nothing is fetched, and no library's notices belong among the measurements.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
exec python benchmarks/decode.py "$@"
