"""The modes of evaluation: how completions are sampled and scored. Results of different modes are not comparable.

- `greedy_pass@1`: one completion at temperature 0;
- `sampling_pass@n`: the majority answer of n completions at a temperature above 0 (self-consistency; Wang et al. 2022,
  arXiv:2203.11171). n = 1 is one sample. The same completions give `pass@k` for every k up to n (Chen et al. 2021);
- `nondet_proxy_pass@n`: whether any of n completions at temperature 0 is right. These differ only by the engine's
  nondeterminism, so the mode is a diagnostic of the engine and not a result to report.

Multiple choice by likelihood (`nmoe.eval.choices`) samples nothing; its modes are LIKELIHOOD_MODES.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmoe.errors import UserError

SAMPLING_TEMPERATURE = 0.6
"""The temperature of `sampling_pass@n` where none is given."""

LIKELIHOOD_MODES = ("likelihood_letter", "likelihood_text")

_NAME = re.compile(r"(greedy_pass|sampling_pass|nondet_proxy_pass)@([1-9]\d{0,5})")
_EXAMPLES = ("greedy_pass@1", "sampling_pass@8", "nondet_proxy_pass@8", *LIKELIHOOD_MODES)


@dataclass(frozen=True)
class Mode:
    """A mode with its number of samples and temperature: `Mode("sampling_pass@8", samples=8, temperature=0.6)`."""

    name: str
    samples: int
    temperature: float

    @property
    def is_of_nondeterminism(self) -> bool:
        """Whether the mode samples several completions at temperature 0, to measure the engine's nondeterminism."""
        return self.temperature == 0 and self.samples > 1


def mode_of(name: str | None = None, samples: int | None = None, temperature: float | None = None) -> Mode:
    """Returns the mode with this name or, without a name, with this many samples at this temperature (default: one sample at 0).

    Raises UserError for an unknown name, and for samples or a temperature that do not fit the name.
    """
    if name is None:
        return _mode_of_sampling(samples or 1, temperature or 0.0)
    if name in LIKELIHOOD_MODES:
        raise UserError(f"{name} samples nothing: it is a mode of `nmoe eval` on multiple choice, not of sampling")
    match = _NAME.fullmatch(name)
    if match is None:
        alike = difflib.get_close_matches(name, _EXAMPLES, n=1)
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        raise UserError(
            f"{name!r} is no mode: one of greedy_pass@1, sampling_pass@N and nondet_proxy_pass@N for N samples{hint}"
        )
    kind, counted = match[1], int(match[2])
    if kind == "greedy_pass" and counted > 1:
        raise UserError(f"{name}: greedy decoding gives one completion; write greedy_pass@1 or nondet_proxy_pass@N")
    if kind == "nondet_proxy_pass" and counted == 1:
        raise UserError(f"{name}: one greedy completion is greedy_pass@1; this mode compares several")
    if samples not in (None, counted):
        raise UserError(f"{name} is of {counted} samples, and {samples} are asked for; drop one of the two")
    if kind == "sampling_pass":
        if temperature == 0:
            raise UserError(f"{name} samples, and at temperature 0 nothing is drawn; use greedy_pass@1")
        return Mode(name, counted, SAMPLING_TEMPERATURE if temperature is None else temperature)
    if temperature:
        raise UserError(f"{name} is at temperature 0, and {temperature:g} is asked for; use sampling_pass@{counted}")
    return Mode(name, counted, 0.0)


def _mode_of_sampling(samples: int, temperature: float) -> Mode:
    if temperature > 0:
        return Mode(f"sampling_pass@{samples}", samples, temperature)
    if samples > 1:
        raise UserError(
            f"temperature 0 gives the same completion {samples} times: use 1 sample, a temperature above 0, or the mode "
            f"nondet_proxy_pass@{samples}, which shows how far the engine's arithmetic differs"
        )
    return Mode("greedy_pass@1", 1, 0.0)


def why_not_comparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Returns why two recorded results cannot be compared (different modes, or different sampling settings in one mode); None if
    they can. Older records lack sampling settings, which are then not compared."""
    if a["mode"] != b["mode"]:
        return f"{a['mode']} and {b['mode']} are different modes, which are never compared: evaluate both in one"
    left, right = a.get("sampling"), b.get("sampling")
    if not left or not right:
        return None
    differing = [key for key in dict.fromkeys((*left, *right)) if left.get(key) != right.get(key)]
    if not differing:
        return None
    named = ", ".join(f"{key} {left.get(key)} and {right.get(key)}" for key in differing)
    return f"both are {a['mode']}, but with {named}: evaluate both with the same settings"
