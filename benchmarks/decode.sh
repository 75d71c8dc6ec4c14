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
    command -v g++ >/dev/null || {
        echo "decode.sh: vLLM compiles its model and needs g++; install it, or leave vLLM out: --sides nmoe,generate,bare" >&2
        exit 2
    }
    WANTED="$(cat benchmarks/requirements-vllm.txt constraints.txt | cksum)"
    if [ "$(cat .venv-vllm/.installed 2>/dev/null)" != "$WANTED" ]; then
        [ -x .venv-vllm/bin/python ] || "$PYTHON" -m venv .venv-vllm
        TORCH="$(grep '^torch==' constraints.txt)"
        echo "installing $TORCH and vLLM into .venv-vllm (minutes the first time)"
        .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "$TORCH"
        .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "$TORCH" -r benchmarks/requirements-vllm.txt
        # They come with vLLM, built for another torch: importing them fails.
        .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
        echo "$WANTED" >.venv-vllm/.installed
    fi
    ;;
esac

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" MKL_NUM_THREADS="${OMP_NUM_THREADS:-2}"
# Nothing is fetched, and no library's notices belong among the measurements.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
exec python benchmarks/decode.py "$@"
