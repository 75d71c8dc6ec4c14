"""Solutions with labelled steps, read from PRM800K, Math-Shepherd and stepwise files."""

from nmoe.data.prm.labelled import LABELS, LabelledSteps, StepDataset, normal, settle, split_steps
from nmoe.data.prm.sources import read_labelled, read_source

__all__ = ["LABELS", "LabelledSteps", "StepDataset", "normal", "read_labelled", "read_source", "settle", "split_steps"]
