"""The plan of the reference budget: parameters as the model has them, and its arithmetic by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from gpu_budget import VOCABULARY, Stage, main, parameters, stages, training_flops_per_token

from nmoe.config.commands import PretrainConfig
from nmoe.config.loader import load_run
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer


def test_the_plan() -> None:
    shape = load_run(Path("speedrun_gpu"), PretrainConfig).model.shape
    assert shape is not None
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab_size=VOCABULARY, **shape.model_dump()))
    assert parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    assert parameters(shape) == pytest.approx(564e6, rel=0.002)
    # 6 x (20 x (4 x 1280^2 + 3 x 1280 x 3456) + 65536 x 1280) + 12 x 20 x 1280 x 2048, but for the norms.
    assert training_flops_per_token(shape) == pytest.approx(2.8823e9 + 0.62915e9, rel=1e-3)
    base, midtraining, sft, sampling, training = stages()
    assert base.tokens == 21_400 * 524_288
    assert base.hours == pytest.approx(11.22e9 * 3.5117e9 / (8 * 989e12 * 0.45) / 3600, rel=1e-3)
    assert (midtraining.tokens, sft.tokens) == (800 * 524_288, 600 * 16_384)
    assert sampling.tokens == training.tokens == 467 * 256 * 150
    assert training.flops == pytest.approx(3 * sampling.flops)
    assert Stage("an hour of the peak", 1, 8 * 989e12 * 3600, 1.0).hours == 1.0


def test_the_documented_table_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out in (Path(__file__).parents[2] / "docs/guides/gpu.md").read_text()
