"""The exact-match reward in the shapes that OpenRLHF and SkyRL call: theirs are stood for by their recorded signatures."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch

import nmoe.grading.adapters
from nmoe.errors import InfrastructureError, UserError
from nmoe.grading.adapters import exact_match as module
from nmoe.grading.adapters.exact_match import appears_cut, exact_match, read_response
from nmoe.types import Verdict


def loaded_as_openrlhf_does(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("reward_func", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.reward_func


def test_openrlhf_gets_rewards_scores_and_numeric_logs() -> None:
    reward_func = loaded_as_openrlhf_does(Path(nmoe.grading.adapters.__file__).parent / "openrlhf.py")
    prompts = ["<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n<|im_start|>assistant\n"] * 4
    responses = [r"So \boxed{42}.", "It is 42<|im_end|>", r"\boxed{\frac{84}{3}} and more words after it", "no idea"]
    queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    found = reward_func(queries, prompts, ["42", 42, "42", "42"], reward_kwargs={})
    assert found.keys() == {"rewards", "scores", "extra_logs"}
    assert found["rewards"].tolist() == found["scores"].tolist() == [1.0, 1.0, 0.0, 0.0]
    logs = {name: values.tolist() for name, values in found["extra_logs"].items()}
    assert logs == {
        "correctness": [1, 1, 0, 0],
        "has_answer": [1, 1, 1, 0],
        "has_boxed": [1, 0, 1, 0],
        "parse_method": [2, 1, 2, 0],
        "boxed_in_final": [1, 0, 0, 0],
        "truncated_response": [0, 0, 1, 1],
    }
    assert all(tensor.dtype == torch.float32 for tensor in (found["rewards"], *found["extra_logs"].values()))


@pytest.mark.parametrize(
    ("response", "cut"),
    [
        ("It is 42.", False),
        ("It is 42", False),
        (r"So \boxed{42}", False),
        ("Therefore the", True),
        ("Therefore x =", True),
        ("Therefore the<|im_end|>", False),
        ("", False),
        ("It is 42. " * 400, False),
        ("It is 42. " * 401, True),
        ("It is 42. " * 401 + r"\boxed{42}", False),
    ],
)
def test_what_looks_cut_at_the_token_limit(response: str, cut: bool) -> None:
    assert appears_cut(response) == cut


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{7}<|reserved_200002|>", "7"),
        ("seven<|reserved_200002|>", None),
        (
            "<|channel|>analysis<|message|>13<|end|><|start|>assistant<|channel|>final<|message|>The answer is 42.<|return|>",
            "42",
        ),
        ("<|channel|>final<|message|>\\boxed{4}2", "4"),
        ("<|channel|>analysis<|message|>42<|return|>", None),
        ("<|channel|>nonsense<|message|>42<|return|>", None),
    ],
)
def test_what_counts_as_the_answer(response: str, answer: str | None) -> None:
    assert read_response(response).answer == answer


@pytest.mark.parametrize("gold", ["", " ", None, True, ["42"], "$ $", "9" * 100_000])
def test_a_label_that_nothing_can_be_compared_with_is_an_error(gold: object) -> None:
    with pytest.raises(UserError, match="label 1 is "):
        exact_match(["1", "1"], ["1", gold])


def test_a_comparison_that_was_lost_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Verdict("error", 0.0, "symbolic", "the worker was killed")
    monkeypatch.setattr(module, "grade_answers", lambda pairs, policy: iter([lost for _ in pairs]))
    with pytest.raises(InfrastructureError, match="the worker was killed"):
        exact_match(["1"], ["1"])


@pytest.fixture
def skyrl_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapter uses of skyrl_gym, as its envs/base_text_env.py has it."""

    class BaseTextEnvStepOutput(TypedDict, total=False):
        observations: list[dict[str, str]]
        reward: float
        done: bool
        metadata: dict[str, Any]
        postprocessed_action: str | None

    class BaseTextEnv:
        def __init__(self) -> None:
            self.turns, self.max_turns = 0, 1
            self.tool_groups: list[Any] = []

        def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
            return prompt, {}

        def close(self) -> None: ...

    base = types.ModuleType("skyrl_gym.envs.base_text_env")
    base.BaseTextEnv, base.BaseTextEnvStepOutput = BaseTextEnv, BaseTextEnvStepOutput  # type: ignore[attr-defined]
    for name in ("skyrl_gym", "skyrl_gym.envs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "skyrl_gym.envs.base_text_env", base)
    monkeypatch.delitem(sys.modules, "nmoe.grading.adapters.skyrl", raising=False)


@pytest.mark.usefixtures("skyrl_gym")
def test_skyrl_steps_once_and_is_done() -> None:
    # As `skyrl_gym.make(env_class, env_config=..., extras=record)` does.
    from nmoe.grading.adapters.skyrl import ExactMatchEnv

    record = {"prompt": [], "env_class": "nmoe_exact_match", "reward_spec": {"method": "rule", "ground_truth": "42"}}
    prompt = [{"role": "user", "content": "What is 6 * 7?"}]
    for action, reward in ((r"\boxed{42}", 1.0), ("43", 0.0)):
        env = ExactMatchEnv(env_config={}, extras=record)
        assert env.init(prompt) == (prompt, {})
        output = env.step(action)
        assert output == {
            "observations": [],
            "reward": reward,
            "done": True,
            "metadata": {
                "answer": action.removeprefix(r"\boxed{").removesuffix("}"),
                "has_boxed": reward == 1.0,
                "parse_method": 2 if reward else 1,
            },
        }
        env.close()
    with pytest.raises(UserError, match="no reward_spec with a ground_truth"):
        ExactMatchEnv(env_config={}, extras={"reward_spec": {"method": "rule"}})
