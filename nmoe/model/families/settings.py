"""Reads a family's `config.json` key by key. Errors name keys that are missing, have a wrong type or are not supported."""

from __future__ import annotations

import math
from typing import Any

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig, RopeScaling
from nmoe.model.rope import yarn_mscale

_MISSING: Any = object()

# Beyond these a `config.json` is damaged, and listing its tensors would not end: layers and experts each have tensors.
_LARGEST = 2**31 - 1
_MOST = {"num_hidden_layers": 4096} | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 65_536
)


class Settings:
    """The keys of a `config.json`. A key that is null counts as absent; `refuse_null` is for keys where transformers does not treat
    null as the default."""

    def __init__(self, raw: dict[str, Any], model_type: str) -> None:
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.nulls = raw.keys() - self.raw.keys()
        self.model_type = model_type

    def require(self, *keys: str) -> None:
        """Raises UserError that lists all missing keys."""
        if missing := [key for key in keys if key not in self.raw]:
            raise UserError(f"missing keys {', '.join(missing)}")

    def whole(self, key: str, default: int = _MISSING) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < 0:
            raise UserError(f"{key} = {value!r} is not a whole number")
        if value > (most := _MOST.get(key, _LARGEST)):
            raise UserError(f"{key} = {value} is larger than {most}, the most that is read")
        return value

    def real(self, key: str, default: float = _MISSING) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"{key} = {value!r} is not a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise UserError(f"{key} = {value!r} is neither true nor false")
        return value

    def wholes(self, key: str) -> tuple[int, ...]:
        """Returns a list of whole numbers; empty if the key is absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            raise UserError(f"{key} = {value!r} is not a list of whole numbers")
        return tuple(value)

    def reals(self, key: str) -> tuple[float, ...]:
        """Returns a list of positive numbers. Raises UserError if the key is absent or has anything else."""
        value = self._get(key, _MISSING)
        if not isinstance(value, list) or any(
            type(item) not in (int, float) or not 0 < item < math.inf for item in value
        ):
            raise UserError(f"{key} = {value!r} is not a list of positive numbers")
        return tuple(map(float, value))

    def only(self, key: str, *values: Any) -> None:
        """Raises UserError if the key has a value other than `values`. An absent or null key passes."""
        if key in self.raw and self.raw[key] not in values:
            known = " or ".join(repr(value) for value in values)
            only = f", only {known}" if known else ""
            raise UserError(f"{self.model_type}: {key} = {self.raw[key]!r} is not supported{only}")

    def refuse_null(self, *keys: str) -> None:
        """Raises UserError if one of these keys is null, which does not mean the same as leaving the key out."""
        if nulls := [key for key in keys if key in self.nulls]:
            raise UserError(f"{self.model_type}: {nulls[0]} = null is not supported; leave the key out for its default")

    def refuse_alias(self, key: str, alias: str) -> None:
        """Raises UserError if both names of a setting are present with different values, because readers differ in which name they
        use."""
        if key in self.raw and alias in self.raw and self.raw[key] != self.raw[alias]:
            raise UserError(
                f"{self.model_type}: {key} = {self.raw[key]!r} and {alias} = {self.raw[alias]!r} are one setting; remove one"
            )

    def section(self, key: str) -> Settings:
        """Returns the keys of a nested table; empty if the table is absent."""
        found = self._get(key, {})
        if not isinstance(found, dict):
            raise UserError(f"{key} = {found!r} is not a table")
        return Settings(found, self.model_type if key.startswith("rope_") else f"{self.model_type}, {key}")

    def refuse_quantised(self, *known: str) -> None:
        """Raises UserError if weights are stored in a quantised form whose `quant_method` is not in `known`."""
        method = self.section("quantization_config").raw.get("quant_method")
        if "quantization_config" in self.raw and method not in known:
            raise UserError(
                f"{self.model_type}: quantization_config.quant_method = {method!r} is not supported, only "
                f"{' or '.join(map(repr, known))}"
            )

    def rotary_dim(self, head_dim: int, default: float) -> int:
        """Returns the number of a head's dimensions that the rotary embedding turns, by `partial_rotary_factor`; 0 for all. Raises
        UserError for a null, for a factor outside of (0, 1], and for one that does not turn a whole number of pairs."""
        settings = self.rope_section()
        for table in (self, settings):
            table.refuse_null("partial_rotary_factor")
        share = settings.real("partial_rotary_factor", self.real("partial_rotary_factor", default))
        if not 0 < share <= 1:
            raise UserError(
                f"{self.model_type}: partial_rotary_factor = {share} is not a share of a head, above 0 and at most 1"
            )
        turned = int(head_dim * share)
        if turned == 0 or turned % 2:
            raise UserError(
                f"{self.model_type}: partial_rotary_factor = {share} turns {turned} of {head_dim} dimensions, not a whole "
                "number of pairs"
            )
        return 0 if turned == head_dim else turned

    def rope(self, default_theta: float = 10_000.0, partial: bool = False) -> tuple[float, RopeScaling | None]:
        """Returns the base of the rotary frequencies and their scaling, from `rope_parameters` (transformers 5) or from
        `rope_theta` and `rope_scaling` (released checkpoints). Raises UserError for a scaling that nmoe does not support and,
        unless `partial`, if only a part of a head is turned."""
        settings = self.rope_section()
        for table in () if partial else (self, settings):
            table.only("partial_rotary_factor", 1, 1.0)
        if nested := [key for key, value in settings.raw.items() if isinstance(value, dict)]:
            raise UserError(f"{self.model_type}: separate rotary settings for {nested[0]!r} are not supported")
        kind = settings.raw.get("rope_type", settings.raw.get("type", "default"))
        theta = settings.real("rope_theta", self.real("rope_theta", default_theta))
        if theta <= 0 or (theta == 1 and kind == "yarn"):
            raise UserError(f"{self.model_type}: rope_theta = {theta} gives no frequencies")
        if kind == "default":
            return theta, None
        if kind not in ("llama3", "yarn", "linear", "dynamic", "longrope"):
            raise UserError(
                f"{self.model_type}: rope type {kind!r} is not supported, only default, linear, dynamic, llama3, yarn and longrope"
            )
        if kind == "longrope":
            return theta, self._longrope(settings)
        settings.require("factor")
        factor = settings.real("factor")
        if factor <= 0:
            raise UserError(f"{self.model_type}: rotary factor = {factor} is not positive")
        if kind == "linear":
            return theta, RopeScaling("linear", factor)
        if kind == "dynamic":
            return theta, RopeScaling("dynamic", factor, self.whole("max_position_embeddings"))
        original = self._original_context(settings)
        if kind == "llama3":
            settings.require("low_freq_factor", "high_freq_factor")
            low, high = settings.real("low_freq_factor"), settings.real("high_freq_factor")
            if not low < high:
                raise UserError(f"{self.model_type}: low_freq_factor = {low} must lie below high_freq_factor = {high}")
            return theta, RopeScaling("llama3", factor, original, low, high)
        settings.refuse_null("truncate")
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            # 0 means the default, as in transformers.
            beta_fast=settings.real("beta_fast", 32.0) or 32.0,
            beta_slow=settings.real("beta_slow", 1.0) or 1.0,
            attention_factor=settings.real("attention_factor", _yarn_attention_factor(settings, factor)),
            truncate=settings.flag("truncate", True),
        )
        return theta, scaling

    def _original_context(self, settings: Settings) -> int:
        # The value outside the rotary settings has priority, as in transformers.
        original = settings.whole("original_max_position_embeddings", self.whole("max_position_embeddings"))
        original = self.whole("original_max_position_embeddings", original)
        if original == 0:
            raise UserError(f"{self.model_type}: original_max_position_embeddings = 0 is not positive")
        return original

    def _longrope(self, settings: Settings) -> RopeScaling:
        settings.require("short_factor", "long_factor")
        original = self._original_context(settings)
        factor = settings.real("factor", self.whole("max_position_embeddings") / original)
        sharpened = 1.0
        if factor > 1:
            if original == 1:
                raise UserError(f"{self.model_type}: original_max_position_embeddings = 1 gives no attention factor")
            sharpened = math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            "longrope",
            factor,
            original,
            attention_factor=settings.real("attention_factor", sharpened),
            short_factors=settings.reals("short_factor"),
            long_factors=settings.reals("long_factor"),
        )

    def rope_section(self) -> Settings:
        """Returns the keys of `rope_scaling` or, if it is absent or empty, of `rope_parameters`: transformers never merges the
        two."""
        settings = self.section("rope_scaling")
        return settings if settings.raw or settings.nulls else self.section("rope_parameters")

    def _get(self, key: str, default: Any) -> Any:
        if key not in self.raw and default is _MISSING:
            raise UserError(f"missing keys {key}")
        return self.raw.get(key, default)


def _yarn_attention_factor(settings: Settings, factor: float) -> float:
    mscale, all_dim = settings.real("mscale", 0.0), settings.real("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`, the keys that every version of transformers and the inference servers read."""
    scaling = config.rope_scaling
    rope: dict[str, Any] | None = None
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind not in ("linear", "dynamic"):
            rope["original_max_position_embeddings"] = scaling.original_context_tokens
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.kind == "longrope":
            rope |= {
                "attention_factor": scaling.attention_factor,
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
            }
        if scaling.kind == "yarn":
            rope |= {
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "attention_factor": scaling.attention_factor,
                "truncate": scaling.truncate,
            }
    return {"rope_theta": config.rope_theta, "rope_scaling": rope}
