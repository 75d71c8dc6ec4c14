#!/usr/bin/env bash
# Trains a checkpoint of nmoe on an environment of nmoe by SkyRL: examples/skyrl/run.sh RUN_OR_CHECKPOINT ENVIRONMENT [key=value ...]
# RECORDS is how many problems to train on (default: 10000). Needs GPUs, and SkyRL and nmoe in one environment:
#   pip install "skyrl[skyrl-train]==0.4.0" "./nmoe[skyrl-gym]"
# SKYRL=echo shows the last command in place of running it.
set -euo pipefail
[ $# -ge 2 ] || {
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
}
checkpoint="$1" environment="$2" here="$(dirname "$0")"
shift 2
mkdir -p runs/skyrl
[ -e runs/skyrl/model ] || nmoe export "$checkpoint" runs/skyrl/model --format hf --dtype bfloat16
nmoe env records "$environment" runs/skyrl/train.jsonl --count "${RECORDS:-10000}"
# An environment of generated problems has held-out ones; of a dataset, name another file as data.val_data.
nmoe env records "$environment" runs/skyrl/validation.jsonl --count 256 --split eval
${SKYRL:-python} "$here/main_nmoe.py" "$@"
