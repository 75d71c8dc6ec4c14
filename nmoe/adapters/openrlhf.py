"""Environments of nmoe as rewards of OpenRLHF, by HTTP:

    nmoe env records word_problems train.jsonl --count 10000
    nmoe env serve word_problems --port 5000
    python -m openrlhf.cli.train_ppo_ray --reward.remote_url http://localhost:5000/get_reward \\
        --data.prompt_dataset train.jsonl --data.input_key prompt --data.label_key label --data.apply_chat_template ...

or without a server, as a file that OpenRLHF imports by its path, with NMOE_ENVIRONMENT=word_problems in the environment of its
workers:

    --reward.remote_url $(python -c "import nmoe.adapters.openrlhf as one; print(one.__file__)")

Tested with OpenRLHF 0.11.2. A reward that fails stops its run: it asks five times, goes on without, and then misses the reward.
"""

from __future__ import annotations

import asyncio
import os
import re
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nmoe.adapters.environment import Finish, SharedEnvironment, shared_by_name
from nmoe.errors import InfrastructureError, UserError
from nmoe.extras import needed_by

if TYPE_CHECKING:
    from starlette.applications import Starlette

# Tokens that end turns in the templates of released models.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|return|>",
    "<|end|>",
    "</s>",
    "<eos>",
)
_ENDING = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, _ENDS))}))+\s*$")
_MOST_BYTES = 64 * 2**20


def rewards_of(
    shared: SharedEnvironment,
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[str],
    end: str | None = None,
) -> dict[str, Any]:
    """Returns what OpenRLHF reads: "rewards"; "scores", the correctness, for its filter; "extra_logs", the components.

    `queries` are prompts with their responses, control tokens included. With `end`, the text of the policy's last token, a response
    that lacks it counts as cut. Raises UserError for queries, prompts and labels that do not belong together.
    """
    if shared.takes_turns:
        raise UserError(
            f"environment {shared.name!r} has tools or answers the policy, and a remote reward sees the end alone"
        )
    if not len(queries) == len(prompts) == len(labels):
        raise UserError(
            f"{len(queries)} queries, {len(prompts)} prompts and {len(labels)} labels do not belong together"
        )
    said: list[str] = []
    finishes: list[Finish] = []
    for query, prompt in zip(queries, prompts, strict=True):
        if not query.startswith(prompt):
            raise UserError(f"the query {query!r:.80} does not begin with its prompt {prompt!r:.80}")
        response = query[len(prompt) :]
        finishes.append("stop" if end is None or response.rstrip().endswith(end) else "length")
        said.append(_ENDING.sub("", response.rstrip().removesuffix(end or "")))
    grades = shared.grade(labels, said, finishes)
    logs = {name: [one.components.get(name, 0.0) for one in grades] for name in shared.components}
    return {
        "rewards": [one.score for one in grades],
        "scores": [one.extras["correctness"] for one in grades],
        "extra_logs": logs,
    }


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any) -> dict[str, Any]:
    """Returns the rewards of responses in OpenRLHF's form, as float tensors `[responses]`. NMOE_ENVIRONMENT names the environment,
    NMOE_STAGE a stage of its curriculum, and NMOE_END the text of the token that ends a turn."""
    import torch

    named = os.environ.get("NMOE_ENVIRONMENT")
    if not named:
        raise UserError("NMOE_ENVIRONMENT is not set; it names the environment whose rewards these are")
    shared = shared_by_name(named, os.environ.get("NMOE_STAGE"))
    found = rewards_of(shared, queries, prompts, labels, os.environ.get("NMOE_END"))
    logs = {name: torch.tensor(values) for name, values in found["extra_logs"].items()}
    return {"rewards": torch.tensor(found["rewards"]), "scores": torch.tensor(found["scores"]), "extra_logs": logs}


def application(shared: SharedEnvironment, end: str | None = None) -> Starlette:
    """Returns the ASGI application with the one route `POST /get_reward`, which takes `{"query": [...], "prompts": [...],
    "labels": [...]}`. Its errors are `{"error": TEXT}`: 400 for a bad request, 503 for a lost grade, 500 for a grader that
    raised."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from nmoe.engine.server.http import body_of
    from nmoe.rollout.collector import GradingError

    async def get_reward(asked: Request) -> JSONResponse:
        try:
            body = await body_of(asked, _MOST_BYTES)
            queries, prompts, labels = (_texts(body, name) for name in ("query", "prompts", "labels"))
            return JSONResponse(await asyncio.to_thread(rewards_of, shared, queries, prompts, labels, end))
        except (InfrastructureError, GradingError) as error:
            traceback.print_exc()
            return JSONResponse({"error": str(error)}, 503 if isinstance(error, InfrastructureError) else 500)
        except UserError as error:
            return JSONResponse({"error": str(error)}, 400)

    return Starlette(routes=[Route("/get_reward", get_reward, methods=["POST"])])


def _texts(body: dict[str, Any], name: str) -> list[str]:
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{name} is {value!r:.80}, and has to be a list of texts")
    return value


def serve(environment: str, host: str, port: int, stage: str | None = None, end: str | None = None) -> None:
    """Serves the rewards of an environment until the process is ended. Raises UserError for an address that cannot be listened
    on."""
    with needed_by("nmoe env serve", "serve"):
        import uvicorn

        from nmoe.engine.server.listening import listening

    with SharedEnvironment(environment, stage=stage) as shared, listening(host, port) as socket:
        app = application(shared, end)
        print(f"rewards of {shared.name}: http://{host}:{socket.getsockname()[1]}/get_reward", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[socket])
