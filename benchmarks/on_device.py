"""`--device` of the benchmarks that run a model, the model there, and the clock that fits."""

from __future__ import annotations

import argparse
import time

import torch

from nmoe.errors import UserError
from nmoe.model.checkpoint import new_model
from nmoe.model.config import ModelConfig
from nmoe.model.device import choose_device, dtype_for, kind_of
from nmoe.model.transformer import Transformer


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`, whose value is a device that is there. Any other ends the process with code 2 and one message."""
    parser.add_argument(
        "--device",
        type=_device,
        default=torch.device("cpu"),
        metavar="NAME",
        help="cpu (the default), cuda or, of several, cuda:1; or auto: a GPU where there is one",
    )


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype | None = None) -> Transformer:
    """A model of random weights, in the dtype that recipes have on the device where none is given."""
    return new_model(config, dtype or dtype_for(device), device).initialize(0)


def wall_clock(device: torch.device) -> float:
    """Seconds of the clock, at which all work of the device is done."""
    kind_of(device).synchronize(device)
    return time.perf_counter()


def work_clock(device: torch.device) -> float:
    """CPU seconds of this process, which other work on the machine disturbs less; on a GPU `wall_clock`."""
    return time.process_time() if kind_of(device).on_host else wall_clock(device)


def _device(name: str) -> torch.device:
    try:
        device = choose_device(name, "--device")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not kind_of(device).on_host:
        kind_of(device).prepare(device)
    return device
