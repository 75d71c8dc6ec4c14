"""The rotary scaling of GGUF files, against llama.cpp's arithmetic done here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import CASES
from gguf_files import write_gguf

from nmoe.errors import UserError
from nmoe.gguf_file import GGUFFile, read_header
from nmoe.model.checkpoint import read_config
from nmoe.model.families import llama
from nmoe.model.gguf.architectures import architecture_of
from nmoe.model.rope import rope_frequencies, rope_table

Headers = Callable[[list[float] | None], GGUFFile]


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Headers:
    """The header of a Llama with heads of eight dimensions and 64 positions, whose file has these factors."""
    model = next(case for case in CASES if case.name == "llama-tied").make()

    @cache
    def written(factors: tuple[float, ...]) -> GGUFFile:
        place = tmp_path_factory.mktemp("gguf")
        array = np.array(factors, dtype=np.float32) if factors else None
        return read_header(write_gguf(model, place / "hf", place / "model.gguf", factors=array))

    return lambda factors: written(tuple(factors or ()))


def changed_by(file: GGUFFile, keys: dict[str, Any]) -> GGUFFile:
    """The header with these keys of the model's rotary position embedding."""
    plain = {key: value for key, value in file.metadata.items() if ".rope.scal" not in key}
    return replace(file, metadata=plain | {f"llama.rope.{key}": value for key, value in keys.items()})


def scaling_keys(keys: dict[str, Any]) -> dict[str, Any]:
    return {f"scaling.{key}": value for key, value in keys.items()}


def test_factors_of_frequencies_that_are_not_llama_3s_are_kept_pair_by_pair(headers: Headers) -> None:
    factors = [1.0, 5 / 3, 7 / 3, 3.0]
    scaling = read_config(headers(factors).path)[1].rope_scaling
    assert scaling is not None
    plain = rope_frequencies(64, 8, 10_000.0)
    torch.testing.assert_close(
        plain / rope_frequencies(64, 8, 10_000.0, scaling), torch.tensor(factors).double(), rtol=1e-6, atol=0
    )
    assert scaling.attention_factor == 1


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"scaling.factor": 4.0}, 4.0),  # without a type
        ({"scale_linear": 2.0}, 2.0),  # of older files
        ({"scaling.factor": 1.0}, None),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
    ],
)
def test_a_factor_without_a_type_is_linear(keys: dict[str, Any], factor: float | None, headers: Headers) -> None:
    changed = changed_by(headers(None), keys)
    scaling = architecture_of(changed).config(changed)["rope_scaling"]
    assert scaling == (None if factor is None else {"rope_type": "linear", "factor": factor})


def turned_by_llama_cpp(keys: dict[str, Any], factors: list[float], position: int) -> list[tuple[float, float]]:
    """Cosine and sine of each pair, as ggml computes them one after the other, in float64."""
    base, dimensions, context = 10_000.0, 8, keys.get("original_context_length", 64)
    scale = 1 / keys.get("factor", 1.0) if keys.get("type") != "none" else 1.0
    mixed = keys.get("yarn_ext_factor", -1.0)
    mixed = float(keys.get("type") == "yarn") if mixed < 0 else mixed

    def dimension(turns: float) -> float:
        return dimensions * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(0, math.floor(dimension(keys.get("yarn_beta_fast", 32.0))))
    last = min(dimensions - 1, math.ceil(dimension(keys.get("yarn_beta_slow", 1.0))))
    found = []
    for pair, factor in enumerate(factors):
        far = position * base ** (-2 * pair / dimensions) / factor
        ramp = 1 - min(1.0, max(0.0, (pair - first) / max(0.001, last - first)))
        angle = scale * far * (1 - ramp * mixed) + far * ramp * mixed
        size = keys.get("attn_factor", 1.0) * keys.get("yarn_attn_factor", 1.0)
        if mixed:
            size *= 1 + 0.1 * math.log(1 / scale)
            if many := keys.get("yarn_log_multiplier"):
                size /= 1 + 0.1 * many * math.log(1 / scale)
        found.append((math.cos(angle) * size, math.sin(angle) * size))
    return found


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"type": "linear", "factor": 4.0}, "linear"),
        ({"type": "linear", "factor": 4.0, "attn_factor": 1.5}, "longrope"),
        ({"attn_factor": 0.75}, "longrope"),
        (YARN, "yarn"),
        (YARN | {"original_context_length": 16, "yarn_beta_fast": 8.0, "yarn_beta_slow": 0.5}, "yarn"),
        (YARN | {"attn_factor": 1.5}, "yarn"),
        (YARN | {"yarn_attn_factor": 0.5}, "yarn"),
        (YARN | {"yarn_log_multiplier": 1.0}, "yarn"),
        (YARN | {"yarn_log_multiplier": 0.7}, "yarn"),
        (YARN | {"yarn_ext_factor": 1.0}, "yarn"),
        (YARN | {"yarn_ext_factor": -1.0}, "yarn"),
        (YARN | {"yarn_ext_factor": 0.5, "yarn_attn_factor": 1.25}, "longrope"),
        (YARN | {"yarn_ext_factor": 0.0}, "linear"),
        ({"type": "linear", "factor": 2.0, "yarn_ext_factor": 0.5}, "longrope"),
        ({"type": "none", "factor": 4.0}, None),
    ],
)
@pytest.mark.parametrize("factors", [None, [1.0, 1.5, 2.0, 8.0]])
def test_rotary_scaling_turns_as_llama_cpp_does(
    keys: dict[str, Any], kind: str | None, factors: list[float] | None, headers: Headers
) -> None:
    file = changed_by(headers(factors), scaling_keys(keys))
    raw = architecture_of(file).config(file)
    assert (raw["rope_scaling"] or {}).get("rope_type") == (kind if factors is None else "longrope")
    config = llama.config_from_hf(raw)
    cos, sin = rope_table(64, 8, config.rope_theta, config.rope_scaling)
    for position in (0, 1, 7, 63):
        wanted = turned_by_llama_cpp(keys, factors or [1.0] * 4, position)
        ours = list(zip(cos[position].tolist(), sin[position].tolist(), strict=True))
        assert ours == [pytest.approx(one, abs=1e-6) for one in wanted]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"type": "dynamic", "factor": 4.0}, r"scaling\.type = 'dynamic' is not read, only linear and yarn"),
        ({"type": "yarn", "factor": -4.0}, r"scaling\.factor = -4 is not a positive number"),
        (YARN | {"attn_factor": 0.0}, r"scaling\.attn_factor = 0 is not a positive number"),
        (YARN | {"yarn_beta_fast": -1.0}, r"scaling\.yarn_beta_fast = -1 is not a positive number"),
        (YARN | {"alpha": 1000.0}, r"scaling\.alpha = 1000 is not read, only 1"),
        (YARN | {"yarn_ext_factor": "1"}, r"scaling\.yarn_ext_factor = '1' is not of the type"),
    ],
)
def test_a_rotary_scaling_that_is_not_read_is_refused_by_its_key(
    keys: dict[str, Any], said: str, headers: Headers
) -> None:
    file = changed_by(headers(None), scaling_keys(keys))
    with pytest.raises(UserError, match=rf"model\.gguf: llama\.rope\.{said}"):
        architecture_of(file).config(file)


def test_factors_for_another_number_of_pairs_are_refused(headers: Headers) -> None:
    file = headers([1.0, 2.0, 3.0])
    with pytest.raises(UserError, match=r"rope_freqs\.weight has the shape \[3\], and a head has 4 pairs"):
        architecture_of(file).config(file)
