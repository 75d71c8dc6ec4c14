"""A model for lm-evaluation-harness that runs a checkpoint in this process (optional dependency `lm-eval`).

    import lm_eval
    from nmoe.eval.lm_eval_model import NmoeLM
    lm_eval.simple_evaluate(model=NmoeLM("runs/base"), tasks=["arc_easy"])

Results equal `--model hf` on the exported checkpoint: the same tokenizer and the same windows of long texts, in fp32 on
a CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
from lm_eval.models.utils import (  # type: ignore[import-not-found]
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found]
from transformers import AutoTokenizer

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import UserError
from nmoe.eval.likelihood import Continuation, likelihoods
from nmoe.model.device import choose_device, dtype_for
from nmoe.model.policy import load_policy
from nmoe.runs.conversions import generation_of
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import Sampling

# Of `generation_kwargs`. The harness's `hf` model keeps the 50 likeliest where top_k is not given; nmoe keeps all.
_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}

Pair = tuple[tuple[str, str] | None, list[int], list[int]]


class NmoeLM(TemplateLM):
    """The lm-evaluation-harness model of a run or checkpoint.

    Raises UserError if the checkpoint cannot be loaded or the device is missing.
    """

    def __init__(self, checkpoint: str | Path, device: str = "auto", max_gen_toks: int = 256) -> None:
        super().__init__()
        directory, on = resolve_checkpoint(Path(checkpoint)), choose_device(device, "device")
        self.model = load_policy(directory, dtype_for(on), on)[0].requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.max_length, self.max_gen_toks = self.model.config.context_tokens, max_gen_toks
        self._name = str(checkpoint)
        # As the exported checkpoint has them: Harmony ends a turn with either of two tokens.
        named = (self.model.generation or generation_of(directory)).get("eos_token_id", [])
        self._stop_ids = tuple({self.eot_token_id, *(named if isinstance(named, list) else [named])})

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.bos_token_id is None else int(self.tokenizer.bos_token_id)

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        # What begins alike lies together, so that the options of a question share its computation.
        order = sorted(range(len(requests)), key=lambda index: (requests[index][1], index))
        groups: list[list[int]] = []
        for index in order:
            if groups and requests[groups[-1][0]][1] == requests[index][1]:
                groups[-1].append(index)
            else:
                groups.append([index])
        found: dict[int, tuple[float, bool]] = {}
        asked = ([self._continuation(*requests[index][1:]) for index in group] for group in groups)
        for group, scored in zip(groups, likelihoods(self.model, asked), strict=True):
            for index, one in zip(group, scored, strict=True):
                found[index] = (sum(one.logprobs), one.greedy)
        return [found[index] for index in range(len(requests))]

    def _continuation(self, context: list[int], continuation: list[int]) -> Continuation:
        # The last token is only predicted, so that a window has one more token than the context of the model.
        whole = [*context, *continuation][-(self.max_length + 1) :]
        return Continuation(whole, max(1, len(whole) - len(continuation)))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        engine = NativeEngine(self.model, max_sequences=256)

        async def all_of_them() -> list[str]:
            return list(await asyncio.gather(*(one(index, *request.args) for index, request in enumerate(requests))))

        async def one(index: int, context: str, given: dict[str, Any]) -> str:
            settings = normalize_gen_kwargs(dict(given), self.max_gen_toks)
            if unknown := sorted(settings.keys() - _SETTINGS):
                raise UserError(
                    f"{', '.join(unknown)}: no setting of nmoe's sampling; known: {', '.join(sorted(_SETTINGS))}"
                )
            eos = self.tokenizer.decode([self.eot_token_id])
            until = handle_stop_sequences(settings.get("until"), eos=eos)
            limit = settings["max_gen_toks"]
            prompt = self.tok_encode(context)[-(self.max_length - limit) :]
            sampling = Sampling(limit, 0.0, stop_ids=self._stop_ids, seed=index)
            if settings["do_sample"]:
                if not settings.get("temperature"):
                    raise UserError("do_sample needs a temperature above 0; without both, decoding is greedy")
                warm = replace(sampling, temperature=float(settings["temperature"]))
                sampling = replace(warm, top_p=float(settings.get("top_p", 1.0)), top_k=int(settings.get("top_k", 0)))
            (sample,) = await engine.generate(Request(tuple(prompt), 1, sampling, f"{index}"))
            text = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            return str(postprocess_generated_text(text, until, None))

        return engine.run(all_of_them())
