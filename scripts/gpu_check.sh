#!/usr/bin/env bash
# What needs a CUDA device: the tests marked gpu, then the benchmark, in under nine minutes. Installs nothing: $PYTHON (default
# python3) must have torch 2.11 or newer with CUDA, triton, pytest, safetensors and transformers. Results: $OUT, or
# benchmarks/results.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out="${OUT:-benchmarks/results}"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { echo "no CUDA device here" >&2; exit 2; }
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_INTERPRET=0 HF_HUB_OFFLINE=1
# Without the other tests' conftest, which wants packages that only whole runs need.
timeout 200 "$python" -m pytest --noconftest -q -rf --tb=short -m gpu tests/gpu 2>&1 | tee "$out/gpu_tests.txt"
tests=${PIPESTATUS[0]}
timeout 320 "$python" benchmarks/gpu.py --results "$out/gpu.json" 2>&1 | tee "$out/gpu_benchmark.txt"
benchmark=${PIPESTATUS[0]}
echo "tests: $tests, benchmark: $benchmark (0 is good)"
exit $((tests != 0 || benchmark != 0))
