"""nmoe: post-training of mixture-of-experts language models by reinforcement learning from verifiable rewards.

    import nmoe

    def brief(completions, **columns):
        return [1 / (1 + len(completion)) for completion in completions]

    run = nmoe.train_rl("path/to/model", env=[{"prompt": "Say hello."}], rewards=[brief])

The names below are the library; each is imported when it is first used, so that `import nmoe` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmoe.api.models import Completion, evaluate, generate, load_model
    from nmoe.api.train import TrainedRun, train_dpo, train_reward, train_rl, train_sft
    from nmoe.engine.native.engine import NativeEngine
    from nmoe.envs.decorators import reward, tool
    from nmoe.envs.environment import Environment
    from nmoe.envs.tasks.live import LiveEpisode
    from nmoe.envs.tasks.own import MultiTurnEnv, Task
    from nmoe.learner.learner import Learner
    from nmoe.text.tokenizer import Tokenizer

_MODULES = {
    "Completion": "nmoe.api.models",
    "Environment": "nmoe.envs.environment",
    "Learner": "nmoe.learner.learner",
    "LiveEpisode": "nmoe.envs.tasks.live",
    "MultiTurnEnv": "nmoe.envs.tasks.own",
    "NativeEngine": "nmoe.engine.native.engine",
    "Task": "nmoe.envs.tasks.own",
    "Tokenizer": "nmoe.text.tokenizer",
    "TrainedRun": "nmoe.api.train",
    "evaluate": "nmoe.api.models",
    "generate": "nmoe.api.models",
    "load_model": "nmoe.api.models",
    "reward": "nmoe.envs.decorators",
    "tool": "nmoe.envs.decorators",
    "train_dpo": "nmoe.api.train",
    "train_reward": "nmoe.api.train",
    "train_rl": "nmoe.api.train",
    "train_sft": "nmoe.api.train",
}

__all__ = [
    "Completion",
    "Environment",
    "Learner",
    "LiveEpisode",
    "MultiTurnEnv",
    "NativeEngine",
    "Task",
    "Tokenizer",
    "TrainedRun",
    "evaluate",
    "generate",
    "load_model",
    "reward",
    "tool",
    "train_dpo",
    "train_reward",
    "train_rl",
    "train_sft",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nmoe' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
