"""Labels of single steps: where they come from (PRM800K, Math-Shepherd, stepwise files) and what is left of them after reading."""

from nmoe.data.prm.labelled import LABELS, LabelledSteps, StepDataset, normal, settle, split_steps
from nmoe.data.prm.sources import read_labelled, read_source

__all__ = ["LABELS", "LabelledSteps", "StepDataset", "normal", "read_labelled", "read_source", "settle", "split_steps"]
