"""TRL's SFTTrainer on the shared workload, as its users run it, timed inside its own training loop.

The trainer is not taken apart: one `Trainer.train()` runs all steps, and a callback stamps the time between
`on_step_begin` and `on_step_end`, so that loading and collating data are not charged to it.
"""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from datasets import Dataset
from sft_workload import (
    ADAM_BETAS,
    ADAM_EPS,
    EOS_ID,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PAD_ID,
    WEIGHT_DECAY,
    Case,
    Step,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer


class StepClock(TrainerCallback):
    """Stamps the trainer's steps and waits before each until it is asked for.

    A step is reported when the trainer stands before the next one: then it has also fetched the next batch, which it must
    not do while another side is being timed.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.trainer: SFTTrainer | None = None
        self.done: Step | None = None

    def report(self) -> None:
        """Hands over the last step, if there was one."""
        if self.done is not None:
            self.connection.send(self.done)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report()
        if self.connection.recv() != state.global_step:
            raise RuntimeError("the trainer takes its steps in order, and another one was asked for")
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.started
        # The trainer adds up losses until it logs, which it does after every step here.
        self.loss = float(self.trainer._tr_loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "grad_norm" in logs:
            self.done = Step(self.seconds, self.loss, float(logs["grad_norm"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report()


def tokenizer(case: Case) -> PreTrainedTokenizerFast:
    """The trainer wants one; the data are token ids already, so that only its special tokens matter."""
    words = {"<pad>": PAD_ID, "<eos>": EOS_ID}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


def serve(connection: Connection, case: Case, steps: int) -> None:
    """Trains on the case's steps 0 to `steps` - 1, each when its number is asked for, and answers with what it took and gave."""
    rows = [row for step in range(steps) for row in case.rows(step)]
    clock = StepClock(connection)
    with tempfile.TemporaryDirectory() as directory:
        trainer = SFTTrainer(
            model=case.make_model(),
            args=SFTConfig(
                output_dir=directory,
                max_steps=steps,
                # the machine
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                # logging falls between the timed steps; nothing is saved or reported
                logging_strategy="steps",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                # the optimizer
                optim="adamw_torch_fused",
                learning_rate=LEARNING_RATE,
                adam_beta1=ADAM_BETAS[0],
                adam_beta2=ADAM_BETAS[1],
                adam_epsilon=ADAM_EPS,
                weight_decay=WEIGHT_DECAY,
                max_grad_norm=MAX_GRAD_NORM,
                lr_scheduler_type="constant",
                warmup_steps=0,
                # the batch: whole sequences in order, none cut
                per_device_train_batch_size=case.sequences,
                train_sampling_strategy="sequential",
                shuffle_dataset=False,
                packing=False,
                max_length=case.length,
                # the loss
                loss_type="nll",
                **({"router_aux_loss_coef": 0.0} if "moe" in case.name else {}),
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer(case),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        clock.trainer = trainer
        trainer.train()
