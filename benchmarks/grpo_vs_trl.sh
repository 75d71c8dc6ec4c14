#!/usr/bin/env bash
# Times a GRPO step of nmoe against TRL's in an environment of its own, .venv-trl; safe to run twice.
# OMP_NUM_THREADS (default 2) sets the threads of both sides; arguments go to grpo_vs_trl.py (see --help).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "grpo_vs_trl.sh: needs Python 3.11 or newer, found $("$PYTHON" --version); set PYTHON to one" >&2
    exit 2
}
ENVIRONMENT=.venv-trl
[ -x "$ENVIRONMENT/bin/python" ] || "$PYTHON" -m venv "$ENVIRONMENT"

# torch by its exact pin first: an open request may pull gigabytes of GPU libraries that this benchmark does not use
TORCH="$(grep '^torch==' constraints.txt)"
echo "installing $TORCH, then TRL and nmoe, into $ENVIRONMENT (minutes the first time)"
"$ENVIRONMENT/bin/python" -m pip install --quiet --disable-pip-version-check "$TORCH"
"$ENVIRONMENT/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -r benchmarks/requirements-trl.txt -e .

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" MKL_NUM_THREADS="${OMP_NUM_THREADS:-2}"
# Nothing is fetched, and neither library's notices belong among the measurements.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
exec "$ENVIRONMENT/bin/python" benchmarks/grpo_vs_trl.py "$@"
