"""The task types by name, one file each."""

from __future__ import annotations

from nmoe.rl.tasks.add import AddTask
from nmoe.rl.tasks.arithmetic import ArithmeticTask
from nmoe.rl.tasks.gsm8k import Gsm8kTask
from nmoe.rl.tasks.math import MathTask
from nmoe.rl.tasks.reverse import ReverseTask
from nmoe.rl.tasks.sort import SortTask
from nmoe.rl.tasks.task import Attempt, GeneratedTask, Task

__all__ = ["GENERATED_TASKS", "TASKS", "Attempt", "GeneratedTask", "Task"]

GENERATED_TASKS: dict[str, GeneratedTask] = {
    "sort": SortTask(),
    "reverse": ReverseTask(),
    "add": AddTask(),
    "arithmetic": ArithmeticTask(),
}

TASKS: dict[str, Task] = {**GENERATED_TASKS, "gsm8k": Gsm8kTask(), "math": MathTask()}
