"""A language model as a judge: a template turns each sample into a question, and the score in the answer becomes the reward.

    score s in the answer -> (s - worst) / (best - worst), for [worst, best] = scale

An answer is invalid if it has no score or one outside the scale, or was cut at `max_tokens`. The sample is then masked and
counted as `grader_error`; it never gets a 0. If `cache` is set, judgements are kept on disk under a hash of their requests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from nmoe.config.tables.rewards import PLACEHOLDER, JudgeRewardConfig, names_in
from nmoe.envs.rewards.reward import Completion, Prompt, Rating, RewardError, Samples, UnavailableError
from nmoe.envs.rewards.service import Service
from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.storage import storage_errors
from nmoe.runs.waiting import all_or_none

_SHOWN_CHARS = 200


class JudgeReward:
    """A reward computed by a language model that judges each sample."""

    def __init__(self, settings: JudgeRewardConfig, service: Service | None = None) -> None:
        """Reads the template and the service's token. Raises UserError if the template cannot be read or shows the judge no
        completion, or the token's environment variable is not set.
        """
        self.name, self.weight = settings.name, settings.weight
        self.only_if_correct = settings.only_if_correct
        self._settings = settings
        self._who = f"reward {settings.name!r} ({settings.model} at {settings.url})"
        self._template = template_of(settings)
        self._score = re.compile(settings.score)
        self._cache = None if settings.cache is None else Cache(Path(settings.cache))
        self._service = service or Service(settings)

    def opened(self) -> AbstractAsyncContextManager[Any]:
        return self._service.opened()

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        requests = [self._request(samples, index) for index in range(len(samples.completions))]
        # At temperature 0, equal questions get equal answers.
        distinct = {key_of(request): request for request in requests}
        asked = dict(zip(distinct, await all_or_none([self._rate(one) for one in distinct.values()]), strict=True))
        return [asked[key_of(request)] for request in requests]

    async def _rate(self, request: Mapping[str, Any]) -> Rating:
        key = key_of({"url": self._settings.url, **request})
        kept = None if self._cache is None else self._cache.get(key)
        try:
            said = kept if kept is not None else _content_of(await self._service.post(request))
            value = self._value(said)
        except UnavailableError as error:
            return Rating(None, f"reward {self.name!r}: {error}")
        if self._cache is not None and kept is None:
            self._cache.put(key, said)
        return Rating(value, cached=kept is not None)

    def _request(self, samples: Samples, index: int) -> dict[str, Any]:
        texts = {name: _text(value) for name, value in samples.columns.items()}
        texts |= {
            "prompt": _prompt_text(samples.prompt),
            "completion": samples.answers[index],
            "reasoning": _reasoning(samples.completions[index]),
        }
        system = [{"role": "system", "content": self._settings.system}] if self._settings.system else []
        return {
            "model": self._settings.model,
            "messages": [*system, {"role": "user", "content": self._filled(texts)}],
            "temperature": 0,
            "max_tokens": self._settings.max_tokens,
            **self._settings.extra_body,
        }

    def _filled(self, texts: Mapping[str, str]) -> str:
        names = names_in(self._template)
        if missing := sorted(names - texts.keys() - {"fence"}):
            raise RewardError(
                f"{self._who}: the template has {{{{{missing[0]}}}}}, and the problem's record no such column; there are "
                f"{', '.join(sorted(texts))}, fence"
            )
        fence = fence_of([texts[name] for name in sorted(names - {"fence"})])
        # Substitute in one pass, so that no text of a sample is read as a placeholder.
        return PLACEHOLDER.sub(lambda match: {**texts, "fence": fence}[match[1]], self._template)

    def _value(self, said: str) -> float:
        """Returns the score in the judge's answer, mapped from its scale to [0, 1]. Raises UnavailableError for an invalid
        answer."""
        found = self._score.findall(said)
        if not found:
            raise UnavailableError(f"no score in the judge's answer {said[-_SHOWN_CHARS:]!r}")
        worst, best = self._settings.scale
        try:
            score = float(found[-1])
        except ValueError:
            raise UnavailableError(f"the judge's score {found[-1][:_SHOWN_CHARS]!r} is not a number") from None
        if not min(worst, best) <= score <= max(worst, best):
            raise UnavailableError(f"the judge's score {score:g} is not between {worst:g} and {best:g}")
        return (score - worst) / (best - worst)


def template_of(settings: JudgeRewardConfig) -> str:
    """Returns the judge's prompt template, read from its file if the settings name one. Raises UserError if the file cannot be
    read, or shows the judge no completion.
    """
    if settings.template is not None:
        return settings.template
    assert settings.template_file is not None, "the settings ask for one of the two"
    try:
        template = Path(settings.template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward {settings.name!r}: {settings.template_file}: cannot be read: {error}") from error
    if not names_in(template) & {"completion", "reasoning"}:
        raise UserError(f"reward {settings.name!r}: {settings.template_file}: shows the judge no {{{{completion}}}}")
    return template


def key_of(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON object in hexadecimal, the key of a request."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fence_of(texts: Sequence[str]) -> str:
    """Returns a delimiter for the texts in a judge's prompt: 16 hexadecimal digits, a hash of the texts that occurs in none of
    them.

    A policy cannot write the digest of its text. Text between two fences is therefore the policy's, and text outside them
    the template's.
    """
    key = json.dumps(texts)
    while True:
        key = hashlib.sha256(key.encode()).hexdigest()
        if not any(key[:16] in text for text in texts):
            return key[:16]


def _content_of(answer: Any) -> str:
    """Returns the text of a chat completion. Raises UnavailableError if there is none."""
    try:
        choice = answer["choices"][0]
        said, ended = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UnavailableError(f"the answer is not a chat completion: {str(answer)[:_SHOWN_CHARS]!r}") from None
    if not isinstance(said, str):
        raise UnavailableError("the judge's answer has no text")
    if ended == "length":
        raise UnavailableError(f"the judge's answer was cut at max_tokens: {said[-_SHOWN_CHARS:]!r}")
    return said


def _prompt_text(prompt: Prompt) -> str:
    """Renders a conversation as text for a judge: a single message as it is, several messages each under its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _reasoning(completion: Completion) -> str:
    messages = [] if isinstance(completion, str) else completion
    return "\n\n".join(message["reasoning_content"] for message in messages if message.get("reasoning_content"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Cache:
    """Judgements on disk under hashes of their requests: `directory/ab/abcd....json` holds {"content": "..."}.

    Each file is written whole or not at all, so that any number of runs may share a directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: str) -> str | None:
        """Returns the text under a key; None without a file, or if the file has another form."""
        try:
            content = json_of(self._path(key).read_text(encoding="utf-8"))["content"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return content if isinstance(content, str) else None

    def put(self, key: str, content: str) -> None:
        """Stores a text under a key. Raises StorageError."""
        path = self._path(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"content": content}), encoding="utf-8")
            os.replace(partial, path)

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / f"{key}.json"
