"""Environments of nmoe as rewards of OpenRLHF, by HTTP:

    nmoe env records word_problems train.jsonl --count 10000
    nmoe env serve word_problems --port 5000 --end '<|im_end|>'
    python -m openrlhf.cli.train_ppo_ray --reward.remote_url http://localhost:5000/get_reward \\
        --data.prompt_dataset train.jsonl --data.input_key prompt --data.label_key label --data.apply_chat_template ...

or without a server, as a file that OpenRLHF imports by its path, with NMOE_ENVIRONMENT=word_problems and NMOE_END='<|im_end|>' in
the environment of its workers:

    --reward.remote_url $(python -c "import nmoe.adapters.openrlhf as one; print(one.__file__)")

Tested with OpenRLHF 0.11.2. A reward that fails stops its run: it asks five times, goes on without, and then misses the reward.
"""

from __future__ import annotations

import base64
import os
import traceback
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nmoe.adapters.environment import Finish, SharedEnvironment, shared_by_name
from nmoe.errors import InfrastructureError, UserError
from nmoe.extras import needed_by
from nmoe.text.conversation import THINK
from nmoe.types import Grade

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp

KEY = "NMOE_REWARDS_KEY"
USER = "nmoe"
"""The name before the key in the address: `http://nmoe:KEY@host:5000/get_reward`."""
_MOST_BYTES = 64 * 2**20

Parsed = tuple[list[str], list[Finish], list[bool]]
"""Responses without the tokens that end them, whether each was cut, and whether each prompt opened the reasoning."""


def rewards_of(
    shared: SharedEnvironment, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], ends: Sequence[str]
) -> dict[str, Any]:  # fmt: skip
    """Returns what OpenRLHF reads: "rewards"; "scores", the correctness, for its filter; "extra_logs", the components, 0 where a
    reward left its own out.

    `queries` are prompts with their responses, control tokens included, and `ends` the texts of the tokens that end the policy's
    turn. A response without one was cut, and earns nothing. Raises UserError for queries, prompts and labels that do not belong
    together.
    """
    responses, finishes, opened = _parsed(shared, queries, prompts, labels, ends)
    return _reply(shared, shared.grade(labels, responses, finishes, opens_reasoning=opened))


def _parsed(
    shared: SharedEnvironment, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], ends: Sequence[str]
) -> Parsed:  # fmt: skip
    if shared.takes_turns:
        raise UserError(
            f"environment {shared.name!r} has tools or answers the policy, and a remote reward sees the end alone"
        )
    if not len(queries) == len(prompts) == len(labels):
        raise UserError(
            f"{len(queries)} queries, {len(prompts)} prompts and {len(labels)} labels do not belong together"
        )
    responses: list[str] = []
    finishes: list[Finish] = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = response_of(query, prompt, label).rstrip()
        finishes.append("stop" if response.endswith(tuple(ends)) else "length")
        while end := next((one for one in ends if response.endswith(one)), ""):
            response = response.removesuffix(end).rstrip()
        responses.append(response)
    return responses, finishes, [prompt.rstrip().endswith(THINK) for prompt in prompts]


def response_of(query: str, prompt: str, label: str) -> str:
    """Returns the part of a query behind its prompt. OpenRLHF decodes the query from tokens, so that its prompt may be composed or
    spaced in another way. Raises UserError where it is another prompt, or lacks its beginning."""
    if query.startswith(prompt):
        return query[len(prompt) :]
    asked = _letters(prompt)
    size = end = 0
    for letter in query:
        if size >= len(asked):
            break
        size, end = size + len(_letters(letter)), end + 1
    if _letters(query[:end]) != asked:
        raise UserError(
            f"the record {label!r}: the query {query!r:.80} does not begin with its prompt {prompt!r:.80}; OpenRLHF cuts the "
            "beginning of prompts that are too long, so leave such records out or raise its limit"
        )
    return query[end:].lstrip()


def _letters(text: str) -> str:
    """Returns a text without white space, decomposed: a letter at a time or as a whole, it has as many characters."""
    return "".join(unicodedata.normalize("NFD", text).split())


def _reply(shared: SharedEnvironment, grades: Sequence[Grade]) -> dict[str, Any]:
    return {
        "rewards": [one.score for one in grades],
        "scores": [one.extras["correctness"] for one in grades],
        "extra_logs": {name: [one.components.get(name, 0.0) for one in grades] for name in shared.components},
    }


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any) -> dict[str, Any]:
    """Returns the rewards of responses in OpenRLHF's form, as float tensors `[responses]`. NMOE_ENVIRONMENT names the environment,
    NMOE_STAGE a stage of its curriculum, and NMOE_END the texts of the tokens that end a turn, with spaces between them."""
    import torch

    named, ends = os.environ.get("NMOE_ENVIRONMENT"), os.environ.get("NMOE_END", "").split()
    if not named:
        raise UserError("NMOE_ENVIRONMENT is not set; it names the environment whose rewards these are")
    if not ends:
        raise UserError(
            "NMOE_END is not set; it is the text of the token that ends the policy's turn, such as <|im_end|>"
        )
    shared = shared_by_name(named, os.environ.get("NMOE_STAGE"))
    found = rewards_of(shared, queries, prompts, labels, ends)
    logs = {name: torch.tensor(values) for name, values in found["extra_logs"].items()}
    return {"rewards": torch.tensor(found["rewards"]), "scores": torch.tensor(found["scores"]), "extra_logs": logs}


def application(shared: SharedEnvironment, ends: Sequence[str]) -> Starlette:
    """Returns the ASGI application with the one route `POST /get_reward`, which takes `{"query": [...], "prompts": [...],
    "labels": [...]}`. Its errors are `{"error": TEXT}`: 400 for a bad request, 413 for one that is too large, 503 for a lost grade,
    500 for a grader that raised. Raises UserError for rewards that one completion does not suffice for."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route

    from nmoe.engine.server.http import TooLargeError, body_of, json_reply, status_of, unless_gone
    from nmoe.rollout.collector import GradingError

    shared.alone()

    async def get_reward(asked: Request) -> Response:
        try:
            body = await body_of(asked, _MOST_BYTES)
            queries, prompts, labels = (_texts(body, name) for name in ("query", "prompts", "labels"))
            said, finishes, opened = _parsed(shared, queries, prompts, labels, ends)
            # OpenRLHF gives up after three minutes, and asks again.
            grades = await unless_gone(asked, shared.agrade(labels, said, finishes, opens_reasoning=opened))
            return json_reply(_reply(shared, grades))
        except ClientDisconnect:
            return Response(status_code=499)
        except (InfrastructureError, GradingError) as error:
            traceback.print_exc()
            return json_reply({"error": str(error)}, 503 if isinstance(error, InfrastructureError) else 500)
        except UserError as error:
            return json_reply({"error": str(error)}, 413 if isinstance(error, TooLargeError) else status_of(error))

    return Starlette(routes=[Route("/get_reward", get_reward, methods=["POST"])])


def with_key(app: ASGIApp, key: str, host: str) -> ASGIApp:
    """Returns an application that wants the key, if there is one, as clients send the one in an address: OpenRLHF has no setting
    for it. Requests of other sites' pages are refused."""
    from starlette.responses import Response

    from nmoe.engine.server.http import json_reply
    from nmoe.web.guard import Refusal, guarded

    def refused(refusal: Refusal) -> Response:
        message = refusal.message
        if refusal.status == 401:
            message = (
                f"the key is missing or wrong: ask http://{USER}:KEY@HOST:PORT/get_reward, with the {KEY} of the server"
            )
        return json_reply(
            {"error": message}, refusal.status, {"WWW-Authenticate": "Basic"} if refusal.status == 401 else None
        )

    sent = base64.b64encode(f"{USER}:{key}".encode()).decode() if key else ""
    return guarded(app, sent, host, KEY, refused, ("Authorization", "Basic "))


def _texts(body: dict[str, Any], name: str) -> list[str]:
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{name} is {value!r:.80}, and has to be a list of texts")
    return value


def serve(environment: str, host: str, port: int, ends: Sequence[str], stage: str | None = None) -> None:
    """Serves the rewards of an environment until the process is ended. Raises UserError for an address that cannot be listened
    on, or that other machines reach without a key."""
    with needed_by("nmoe env serve", "serve"):
        import uvicorn

        from nmoe.engine.server.listening import check_key, listening

    key = os.environ.get(KEY, "")
    check_key(host, key, KEY, "have code run here, and find the answers")
    if not all(ends):
        raise UserError("--end is empty; it is the text of the token that ends the policy's turn, such as <|im_end|>")
    with SharedEnvironment(environment, stage=stage) as shared, listening(host, port) as socket:
        app = with_key(application(shared, ends), key, host)
        print(f"rewards of {shared.name}: http://{host}:{socket.getsockname()[1]}/get_reward", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[socket])
