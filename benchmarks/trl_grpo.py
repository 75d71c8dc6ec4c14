"""One GRPO step of TRL's GRPOTrainer on the shared workload, as its users run it, timed inside its own training loop.

The trainer is not taken apart: `Trainer.train()` runs, and a callback stamps the time between `on_step_begin` and
`on_step_end`, so data loading, logging and saving are not charged to it. Completion lengths are forced by a logits
processor that lets the end token through exactly where a row shall end, so that `generate` sees finished rows as always.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from datasets import Dataset
from grpo_workload import (
    ADAM_BETAS,
    ADAM_EPS,
    CLIP_EPS,
    EOS_ID,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    N_COMPLETIONS,
    PAD_ID,
    WEIGHT_DECAY,
    Dtype,
    GradedBatch,
    Workload,
    make_model,
    make_prompts,
    reward,
)
from side import answer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def word_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """One word per token id ("t17" is id 17), because TRL takes prompts as text: any ids survive the way there."""
    words = {f"t{i}": i for i in range(vocabulary_size) if i not in (PAD_ID, EOS_ID)}
    # Special tokens match inside words, so theirs must not be the beginning of another word.
    words |= {"<pad>": PAD_ID, "<eos>": EOS_ID}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


class ForcedLengths(LogitsProcessor):
    """Bars the end token until a row's last position and forces it there; rows of the maximal length just run out."""

    def __init__(self, lengths: list[int], prompt_length: int, longest: int) -> None:
        self.prompt_length = prompt_length
        self.ending_rows: dict[int, torch.Tensor] = {
            length: torch.tensor([row for row, other in enumerate(lengths) if other == length])
            for length in set(lengths)
            if length < longest
        }

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, EOS_ID] = -torch.inf
        rows = self.ending_rows.get(input_ids.shape[1] - self.prompt_length + 1)
        if rows is not None:
            scores[rows] = -torch.inf
            scores[rows, EOS_ID] = 0.0
        return scores


class StepClock(TrainerCallback):
    """Stamps one training step and keeps what the trainer had in hand at its end, for the parity check."""

    def __init__(self) -> None:
        self.trainer: GRPOTrainer | None = None
        self.seconds = self.cpu_seconds = 0.0
        self.keep_gradients = False
        self.gradients: dict[str, torch.Tensor] = {}
        self.loss = 0.0
        self.gradient_norm = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.started
        self.cpu_seconds = time.process_time() - self.cpu_started
        self.loss = float(self.trainer._tr_loss)
        control.should_log = self.keep_gradients

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.keep_gradients:
            self.gradients = {name: p.grad.clone() for name, p in kwargs["model"].named_parameters()}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.keep_gradients and logs and "grad_norm" in logs:
            self.gradient_norm = float(logs["grad_norm"])


def even_share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The workload's reward in the signature TRL calls."""
    return [reward(ids) for ids in completion_ids]


class TrlGrpo:
    """GRPOTrainer with the workload's weights; each `step` is one whole training step on all completions. In bf16 the weights are
    bf16 and so is AdamW's state, without fp32 copies, which is TRL's fastest way; its generation then has a static cache, as the
    faster one (peer_decode.py)."""

    def __init__(self, workload: Workload, dtype: Dtype = "fp32") -> None:
        self.workload = workload
        model = make_model(workload, dtype)
        self.tokenizer = word_tokenizer(model.config.vocab_size)
        prompts = [" ".join(f"t{i}" for i in ids) for ids in make_prompts(workload)]
        self.output_dir = tempfile.TemporaryDirectory()
        arguments = {
            "output_dir": self.output_dir.name,
            "max_steps": 1,
            # the machine
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "dataloader_pin_memory": False,
            # nothing is logged, saved or reported within a timed step
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            # the optimizer
            "optim": "adamw_torch",
            "learning_rate": LEARNING_RATE,
            "adam_beta1": ADAM_BETAS[0],
            "adam_beta2": ADAM_BETAS[1],
            "adam_epsilon": ADAM_EPS,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            # the batch: all rows generated at once, one update
            "per_device_train_batch_size": workload.rows_at_once,
            "gradient_accumulation_steps": workload.rows // workload.rows_at_once,
            "steps_per_generation": workload.rows // workload.rows_at_once,
            "num_generations": N_COMPLETIONS,
            "num_iterations": 1,
            "shuffle_dataset": False,
            "max_completion_length": workload.max_new_tokens,
            # sampling from the plain distribution, by transformers' own generate
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "use_vllm": False,
            "cache_implementation": "static" if dtype == "bf16" else None,
            "use_transformers_continuous_batching": False,
            # the loss
            "loss_type": "dapo",
            "scale_rewards": "group",
            "epsilon": CLIP_EPS,
            "beta": 0.0,
            "router_aux_loss_coef": 0.0,
            "disable_dropout": True,
        }
        self.clock = StepClock()
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=even_share,
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=self.tokenizer,
            callbacks=[self.clock],
        )
        self.trainer.remove_callback(PrinterCallback)
        self.clock.trainer = self.trainer
        if self.tokenizer(prompts)["input_ids"] != make_prompts(workload):
            raise RuntimeError("the prompts do not survive TRL's tokenizer; both sides must see the same ids")
        self.generation_seconds = self.generation_cpu_seconds = 0.0
        self._lengths: list[int] = []
        self._generate = model.generate
        model.generate = self._generate_forced

    def _generate_forced(self, **inputs: Any) -> torch.Tensor:
        started, cpu_started = time.perf_counter(), time.process_time()
        forced = ForcedLengths(self._lengths, self.workload.prompt_length, self.workload.max_new_tokens)
        processors = LogitsProcessorList([forced])
        tokens = self._generate(**inputs, logits_processor=processors)
        self.generation_seconds = time.perf_counter() - started
        self.generation_cpu_seconds = time.process_time() - cpu_started
        return tokens

    def step(self, lengths: list[int]) -> float:
        """Generate completions of these lengths (row i for prompt i // 8), grade, update; seconds of that one step."""
        self._lengths = lengths
        self.trainer.train()
        return self.clock.seconds

    def last_batch(self) -> GradedBatch:
        """What the last step trained on, in the (shuffled) order the trainer used."""
        whole = GradedBatch([], [], [])
        for batch in self.trainer._buffered_inputs:
            lengths = batch["completion_mask"].sum(1).tolist()
            whole.prompt_ids.extend(batch["prompt_ids"].tolist())
            whole.completion_ids.extend(
                ids[:n] for ids, n in zip(batch["completion_ids"].tolist(), lengths, strict=True)
            )
            whole.advantages.extend(batch["advantages"].tolist())
        return whole


@dataclass(frozen=True)
class TrlStep:
    """What TRL's process says of one step."""

    seconds: float
    cpu_seconds: float
    batch: GradedBatch
    generation_seconds: float
    generation_cpu_seconds: float


def serve(connection: Connection, workload: Workload, dtype: Dtype) -> None:
    """Takes a step with the completion lengths asked for, and answers with what it took and trained on."""
    side = TrlGrpo(workload, dtype)

    def step(lengths: list[int]) -> TrlStep:
        seconds = side.step(lengths)
        generation = side.generation_seconds, side.generation_cpu_seconds
        return TrlStep(seconds, side.clock.cpu_seconds, side.last_batch(), *generation)

    answer(connection, step)
