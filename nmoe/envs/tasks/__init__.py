"""The task types by name, one file each."""

from __future__ import annotations

from nmoe.envs.tasks.add import AddTask
from nmoe.envs.tasks.arithmetic import ArithmeticTask
from nmoe.envs.tasks.choice import MultipleChoiceTask
from nmoe.envs.tasks.code_edit import CodeEditTask
from nmoe.envs.tasks.file_search import FileSearchTask
from nmoe.envs.tasks.gsm8k import Gsm8kTask
from nmoe.envs.tasks.guess import GuessTask
from nmoe.envs.tasks.humaneval import HumanEvalTask
from nmoe.envs.tasks.math import MathTask
from nmoe.envs.tasks.mbpp import MbppTask
from nmoe.envs.tasks.open import OpenTask
from nmoe.envs.tasks.prm import PrmSolutionTask, PrmStepTask
from nmoe.envs.tasks.proof import ProofGenerationTask
from nmoe.envs.tasks.reasoning_gym import ReasoningGymTask
from nmoe.envs.tasks.reverse import ReverseTask
from nmoe.envs.tasks.score import MetaVerificationTask, ProofVerificationTask
from nmoe.envs.tasks.sort import SortTask
from nmoe.envs.tasks.sum import SumTask
from nmoe.envs.tasks.task import Attempt, GeneratedTask, Task
from nmoe.envs.tasks.text_match import TextMatchTask

__all__ = ["CODE_TASKS", "DATASET_TASKS", "GENERATED_TASKS", "TASKS", "Attempt", "GeneratedTask", "Task"]

GENERATED_TASKS: dict[str, GeneratedTask] = {
    "sort": SortTask(),
    "reverse": ReverseTask(),
    "add": AddTask(),
    "arithmetic": ArithmeticTask(),
    "sum": SumTask(),
    "guess": GuessTask(),
}

# Tasks over code and files, whose records have a form of their own.
CODE_TASKS: dict[str, Task] = {
    "humaneval": HumanEvalTask(),
    "mbpp": MbppTask(),
    "code_edit": CodeEditTask(),
    "file_search": FileSearchTask(),
}

# Tasks that can grade the records of a dataset.
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
