"""The exact-match reward as an environment of SkyRL, for records with a `reward_spec`.

In the training entry point:

    from skyrl_gym.envs import register
    register(id="nmoe_exact_match", entry_point="nmoe.grading.adapters.skyrl:ExactMatchEnv")

and `"env_class": "nmoe_exact_match"` in the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from nmoe.errors import UserError
from nmoe.grading.adapters.exact_match import exact_match


class ExactMatchEnv(BaseTextEnv):
    """An environment of one turn, which grades the response against `reward_spec["ground_truth"]`."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        """Reads the ground truth from the record `extras`. Raises UserError if there is none."""
        super().__init__()
        spec = (extras or {}).get("reward_spec")
        if not isinstance(spec, Mapping) or spec.get("ground_truth") is None:
            raise UserError("the record has no reward_spec with a ground_truth")
        self.ground_truth = spec["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        (reward,), (read,) = exact_match([action], [self.ground_truth])
        metadata = {"answer": read.answer, "has_boxed": read.has_boxed, "parse_method": read.method}
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)
