"""Grade-school word problems with one number as the answer (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

from nmoe.envs.tasks.numeric import NumericTask


class Gsm8kTask(NumericTask):
    bare_final = False
