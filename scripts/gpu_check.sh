#!/usr/bin/env bash
# What needs a CUDA device: the tests marked gpu, tiny runs of the recipes (a step of GRPO among them), the benchmark of a GPU, those of
# a CPU that run there too, and the speedrun; with arguments only those named: scripts/gpu_check.sh tests runs. Each has a time limit;
# all but the speedrun should end in a quarter of an hour together. Installs nothing: $PYTHON (default python3) must have torch 2.11 or newer with CUDA, triton, pytest, and what
# nmoe needs; the benchmark transformers, too, and the speedrun matplotlib. Results: $OUT, or benchmarks/results.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out="${OUT:-benchmarks/results}"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { echo "no CUDA device here" >&2; exit 2; }
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_INTERPRET=0 HF_HUB_OFFLINE=1

part() {
    case "$1" in
        # Without the other tests' conftest, which wants packages that only whole runs need.
        tests) timeout 200 "$python" -m pytest --noconftest -q -rf --tb=short -m gpu tests/gpu ;;
        runs) timeout 240 "$python" scripts/gpu_runs.py cuda ;;
        benchmark) timeout 320 "$python" benchmarks/gpu.py --results "$out/gpu.json" ;;
        # One that fails leaves the others alone.
        benchmarks) (
            failed=0
            timeout 120 "$python" benchmarks/head.py --device cuda --out "$out/gpu_head.json" || failed=1
            timeout 120 "$python" benchmarks/prefill.py --device cuda --dtypes bf16 --out "$out/gpu_prefill.json" || failed=1
            timeout 120 "$python" benchmarks/scaling.py --device cuda || failed=1
            timeout 120 "$python" benchmarks/rollouts.py --device cuda || failed=1
            timeout 120 "$python" benchmarks/saving.py --device cuda || failed=1
            exit "$failed"
        ) ;;
        speedrun) timeout 1800 "$python" -m nmoe speedrun --scratch --device cuda --out "$(mktemp -d)/speedrun" ;;
        *) echo "no such part: $1; there are tests, runs, benchmark, benchmarks and speedrun" >&2; return 2 ;;
    esac
}

failed=""
[ $# -gt 0 ] || set -- tests runs benchmark benchmarks speedrun
for name in "$@"; do
    part "$name" 2>&1 | tee "$out/gpu_$name.txt" || failed="$failed $name"
done
echo "failed:${failed:- none}"
[ -z "$failed" ]
