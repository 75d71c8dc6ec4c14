# Sourced by the benchmarks against TRL: makes their environment, .venv-trl, where it is missing, and sets PYTHON_TRL to its
# interpreter. Safe to run twice. OMP_NUM_THREADS (default 2) sets the threads of every side.
PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$(basename "$0"): needs Python 3.11 or newer, found $("$PYTHON" --version); set PYTHON to one" >&2
    exit 2
}
ENVIRONMENT=.venv-trl
PYTHON_TRL="$ENVIRONMENT/bin/python"
[ -x "$PYTHON_TRL" ] || "$PYTHON" -m venv "$ENVIRONMENT"

# torch by its exact pin first: an open request may pull gigabytes of GPU libraries that these benchmarks do not use
TORCH="$(grep '^torch==' constraints.txt)"
echo "installing $TORCH, then TRL and nmoe, into $ENVIRONMENT (minutes the first time)"
"$PYTHON_TRL" -m pip install --quiet --disable-pip-version-check "$TORCH"
"$PYTHON_TRL" -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -r benchmarks/requirements-trl.txt -e .

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" MKL_NUM_THREADS="${OMP_NUM_THREADS:-2}"
# Nothing is fetched, and no library's notices belong among the measurements.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export HF_DATASETS_DISABLE_PROGRESS_BARS=1 HF_HUB_DISABLE_PROGRESS_BARS=1
