"""What each rank of `test_rank_checks` runs: the checks that are named."""

import sys
from datetime import timedelta

import torch.distributed as dist

from nmoe.rank_checks.run import run_checks

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_checks(sys.argv[1:], say=lambda line: print(line, flush=True), deadline_s=60, brief=True)
    dist.destroy_process_group()
