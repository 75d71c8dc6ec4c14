#!/usr/bin/env bash
# From a fresh clone to a model that learned by reinforcement learning: installs into .venv, then runs `nmoe speedrun`.
#   ./speedrun.sh                          a released model of 135M weights; results in runs/real
#   ./speedrun.sh --scratch                a small model from nothing, without a download but packages; results in runs/speedrun
#   ./speedrun.sh --seed 1 --out runs/one  another seed, another place
set -euo pipefail
root="$(cd "$(dirname "$0")" && pwd)"
. "$root/scripts/environment.sh"
# README goes on with `nmoe serve`.
prepare_environment "$root" report,serve
export PYTHONUNBUFFERED=1
exec nmoe speedrun "$@"
