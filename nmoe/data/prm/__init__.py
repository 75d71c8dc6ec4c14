"""Solutions with labelled steps, read from PRM800K, Math-Shepherd and stepwise files."""

from nmoe.data.prm.labelled import LABELS, LabelledSteps, StepDataset, normal, settle, split_steps
from nmoe.data.prm.sources import PRM800K, read_labelled, read_source

__all__ = [
    "LABELS",
    "PRM800K",
    "LabelledSteps",
    "StepDataset",
    "normal",
    "read_labelled",
    "read_source",
    "settle",
    "split_steps",
]
