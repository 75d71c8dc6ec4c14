"""The task types by name, one file each."""

from __future__ import annotations

from nmoe.rl.tasks.add import AddTask
from nmoe.rl.tasks.arithmetic import ArithmeticTask
from nmoe.rl.tasks.choice import MultipleChoiceTask
from nmoe.rl.tasks.code_edit import CodeEditTask
from nmoe.rl.tasks.file_search import FileSearchTask
from nmoe.rl.tasks.gsm8k import Gsm8kTask
from nmoe.rl.tasks.humaneval import HumanEvalTask
from nmoe.rl.tasks.math import MathTask
from nmoe.rl.tasks.mbpp import MbppTask
from nmoe.rl.tasks.open import OpenTask
from nmoe.rl.tasks.prm import PrmSolutionTask, PrmStepTask
from nmoe.rl.tasks.proof import ProofGenerationTask
from nmoe.rl.tasks.reasoning_gym import ReasoningGymTask
from nmoe.rl.tasks.reverse import ReverseTask
from nmoe.rl.tasks.score import MetaVerificationTask, ProofVerificationTask
from nmoe.rl.tasks.sort import SortTask
from nmoe.rl.tasks.sum import SumTask
from nmoe.rl.tasks.task import Attempt, GeneratedTask, Task
from nmoe.rl.tasks.text_match import TextMatchTask

__all__ = ["CODE_TASKS", "DATASET_TASKS", "GENERATED_TASKS", "TASKS", "Attempt", "GeneratedTask", "Task"]

GENERATED_TASKS: dict[str, GeneratedTask] = {
    "sort": SortTask(),
    "reverse": ReverseTask(),
    "add": AddTask(),
    "arithmetic": ArithmeticTask(),
    "sum": SumTask(),
}

# Those over code and files, whose records have a form of their own.
CODE_TASKS: dict[str, Task] = {
    "humaneval": HumanEvalTask(),
    "mbpp": MbppTask(),
    "code_edit": CodeEditTask(),
    "file_search": FileSearchTask(),
}

# Those that can grade the records of a dataset.
DATASET_TASKS: dict[str, Task] = {
    **GENERATED_TASKS,
    "gsm8k": Gsm8kTask(),
    "math": MathTask(),
    "multiple_choice": MultipleChoiceTask(),
    "proof_verification": ProofVerificationTask(),
    "meta_verification": MetaVerificationTask(),
    "prm_step": PrmStepTask(),
    "prm_solution": PrmSolutionTask(),
    **CODE_TASKS,
    "text_match": TextMatchTask(),
    "open": OpenTask(),
}

TASKS: dict[str, Task] = {
    **DATASET_TASKS,
    "reasoning_gym": ReasoningGymTask(),
    "proof_generation": ProofGenerationTask(),
}
