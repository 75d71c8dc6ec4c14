"""The exact-match reward as a file that OpenRLHF imports by its path:

    --reward.remote_url $(python -c "import nmoe.grading.adapters.openrlhf as one; print(one.__file__)") --data.label_key label

(In older versions the flags are `--remote_rm_url` and `--label_key`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nmoe.grading.adapters.exact_match import appears_cut, exact_match


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[object], **_: Any) -> dict[str, Any]:
    """Returns the rewards of responses, in OpenRLHF's form. `queries` are the prompts with their responses.

    The keys are "rewards" for the advantage, "scores" in [0, 1] for dynamic filtering, and "extra_logs"; values are float tensors
    `[responses]`.
    """
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards, read = exact_match(responses, labels)
    logs = {
        "correctness": rewards,
        "has_answer": [one.answer is not None for one in read],
        "has_boxed": [one.has_boxed for one in read],
        "parse_method": [one.method for one in read],
        "boxed_in_final": [one.boxed_in_final for one in read],
        "truncated_response": [appears_cut(response) for response in responses],
    }
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in logs.items()}
    return {"rewards": tensors["correctness"], "scores": tensors["correctness"], "extra_logs": tensors}
