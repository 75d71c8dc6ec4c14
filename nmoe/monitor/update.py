"""Rules about weight updates: the gradient, how far an update moves the policy, and expert load; and the limits for
spikes.jsonl."""

from __future__ import annotations

from itertools import pairwise

from nmoe.config.tables.monitor import (
    ClipSection,
    ExpertsSection,
    GradNormRiseSection,
    GradNormSection,
    KLSection,
    RatiosSection,
    ReferenceSection,
)
from nmoe.monitor.monitor import Metrics, Rule


class ClipRule(Rule[ClipSection]):
    """Fires when the loss clips most tokens of an update, or an update moves most tokens out of the clip range."""

    name = "clip"
    smoke = True
    source = "training guidelines, early smoke-test criteria: ppo_clip_ratio below 40%"
    remedies = ("lower optimizer.learning_rate", "lower batch.updates_per_step or batch.passes_per_step")

    def symptom(self, metrics: Metrics) -> str | None:
        inside, after = metrics.get("ppo_clip_ratio", 0.0), metrics.get("update_clip_ratio", 0.0)
        if inside > self.settings.above:
            return f"{inside:.0%} of the tokens are clipped"
        return (
            f"the update takes {after:.0%} of the tokens out of the clip range" if after > self.settings.above else None
        )


# The rule fires at once at an update this many times beyond the limit.
_AT_ONCE = 10


class KLRule(Rule[KLSection]):
    """Fires when the policy moves too far in each of several steps, or very far in one, or its KL estimate stays negative."""

    name = "kl"
    source = "training guidelines, tier 2: ppo_kl, large spikes or sustained negative values"
    counts_itself = True
    remedies = ("lower optimizer.learning_rate", "lower algorithm.clip_low and clip_high", "raise algorithm.kl_coef")

    def __init__(self, settings: KLSection) -> None:
        super().__init__(settings)
        self._large = self._negative = 0

    def symptom(self, metrics: Metrics) -> str | None:
        kl = metrics.get("ppo_kl")
        if kl is None:
            return None
        # Inside the updates and after them: the first is about 0 where a step takes one update.
        name, most = max(("ppo_kl", kl), ("update_kl", metrics.get("update_kl", 0.0)), key=lambda one: abs(one[1]))
        self._large = self._large + 1 if abs(most) > self.settings.above else 0
        self._negative = self._negative + 1 if kl < -1e-6 else 0
        # After such an update there may be no next one: every reward is the lowest.
        if name == "update_kl" and most > _AT_ONCE * self.settings.above:
            return f"update_kl is {most:.3g}, in one step beyond {_AT_ONCE} times {self.settings.above:g}"
        if self._large >= self.settings.steps:
            return f"{name} is {most:.3g}, {self._large} steps in a row beyond {self.settings.above:g}"
        if self._negative >= self.settings.negative_steps:
            return f"ppo_kl is negative for {self._negative} steps"
        return None


class RatiosRule(Rule[RatiosSection]):
    """Fires when an update multiplies or divides the probability of a token by a large factor."""

    name = "ratios"
    source = "training guidelines, tier 2 tails: log_ratio_raw_max above 5, ratio_max above 10"
    remedies = (
        "lower algorithm.clip_low and clip_high",
        "lower optimizer.learning_rate; clipping advantages does not help",
        "read the worst samples of spikes.jsonl",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        raw, ratio = metrics.get("log_ratio_raw_max", 0.0), metrics.get("ratio_max", 0.0)
        if raw > self.settings.log_ratio:
            return f"a token's log ratio is {raw:.3g}"
        if ratio > self.settings.above:
            return f"a token's importance ratio is {ratio:.3g}"
        # What the updates did, upwards and downwards: a token that was pushed away is as far.
        high, low = metrics.get("update_log_ratio_max", 0.0), metrics.get("update_log_ratio_min", 0.0)
        far = max(high, low, key=abs)
        if abs(far) > self.settings.log_ratio:
            return f"the update moves a token's log-probability by {far:+.3g}"
        ratio = metrics.get("update_ratio_max", 0.0)
        return f"the update makes a token {ratio:.3g} times as likely" if ratio > self.settings.above else None


class ReferenceRule(Rule[ReferenceSection]):
    """Fires when the policy is far from its reference model."""

    name = "reference"
    source = "training guidelines, tier 2: ppo_kl from the reference policy; tails: log_ratio_raw_max of policy against reference"
    remedies = (
        "compare correctness with the first steps: where it fell, go back to a checkpoint before",
        "lower optimizer.learning_rate",
        "raise algorithm.kl_coef",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        kl = metrics.get("reference_kl", 0.0)
        if kl > self.settings.above:
            return f"the policy is {kl:.3g} nats a token from its reference"
        tail = metrics.get("reference_log_ratio_abs_p99", 0.0)
        if tail > self.settings.log_ratio:
            return f"one token in a hundred is {tail:.3g} in log-probability from the reference"
        return None


class GradNormRule(Rule[GradNormSection]):
    """Fires when the gradient's norm is 0 or too large."""

    name = "grad_norm"
    smoke = True
    source = "training guidelines, early smoke-test criteria: grad_norm non-zero and below 100"
    remedies = (
        "at 0: see that [lora] targets or the learning rate do not freeze every weight",
        "above the limit: lower optimizer.learning_rate",
        "lower algorithm.clip_low and clip_high: extreme log-ratios cause spikes, not advantages",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        norm = metrics.get("grad_norm")
        if norm is None:
            return None
        if norm == 0:
            return "the gradient is 0, so that no weight moves"
        return f"the gradient's norm is {norm:.3g}" if norm > self.settings.above else None


class GradNormRiseRule(Rule[GradNormRiseSection]):
    """Fires when the maximum gradient norm rises from one period of steps to the next, several times in a row."""

    name = "grad_norm_rise"
    source = "training guidelines, overfitting: the maximum of grad_norm per ten steps rises"
    counts_itself = True
    remedies = (
        "lower optimizer.learning_rate",
        "lower algorithm.clip_low and clip_high",
        "go back to the checkpoint before the rise",
    )

    def __init__(self, settings: GradNormRiseSection) -> None:
        super().__init__(settings)
        self._stretch: list[float] = []
        self._highest: list[float] = []

    def symptom(self, metrics: Metrics) -> str | None:
        if "grad_norm" not in metrics:
            return None
        self._stretch.append(metrics["grad_norm"])
        if len(self._stretch) < self.settings.steps:
            return None
        self._highest.append(max(self._stretch))
        self._stretch = []
        last = self._highest[-self.settings.stretches :]
        if len(last) < self.settings.stretches or any(after <= before for before, after in pairwise(last)):
            return None
        if last[-1] <= self.settings.factor * last[0]:
            return None
        return f"the highest norm of {self.settings.steps} steps rose from {last[0]:.3g} to {last[-1]:.3g}"


_VIOLATION = "expert_load_max_violation/"


class ExpertsRule(Rule[ExpertsSection]):
    """Fires when the router of a layer sends most tokens to few experts, or sends none to many experts."""

    name = "experts"
    source = "DeepSeek-V3 (arXiv:2412.19437), section 2.1.2: MaxVio, which a healthy start of 8 experts brings below 2 by step 38"
    remedies = (
        "raise model.router_aux_loss_coef, or model.router_bias_rate where the router balances by its bias",
        "lower optimizer.learning_rate",
    )

    def __init__(self, settings: ExpertsSection, experts: int) -> None:
        """Makes the rule for a model with `experts` routed experts per layer."""
        super().__init__(settings)
        self._experts, self._seen = experts, 0

    def symptom(self, metrics: Metrics) -> str | None:
        layers = [name.removeprefix(_VIOLATION) for name in metrics if name.startswith(_VIOLATION)]
        self._seen += bool(layers)
        if self._seen <= self.settings.warmup_steps:
            return None
        balanced = self._seen > self.settings.balance_steps
        collapsing = []
        for layer in layers:
            violation, dead = metrics[_VIOLATION + layer], metrics[f"dead_experts/{layer}"] / self._experts
            if (balanced and violation >= self.settings.violation) or dead >= self.settings.dead:
                collapsing.append(
                    f"layer {layer} (its busiest expert has {violation + 1:.1f} times its share, {dead:.0%} have nothing to do)"
                )
        return f"experts collapse in {', '.join(collapsing)}" if collapsing else None


# The training guidelines' limits for spikes.jsonl; the gradient's norm is measured before clipping.
_SPIKE_LIMITS = {
    "grad_norm": 50.0,
    "log_ratio_raw_max": 5.0,
    "ratio_max": 10.0,
    "update_log_ratio_max": 5.0,
    "update_log_ratio_min": 5.0,
    "update_ratio_max": 10.0,
}
_SPIKE_DIVERGENCES = ("ppo_kl", "update_kl")


def spikes_in(metrics: Metrics, kl_above: float) -> list[str]:
    """Returns the names of a step's metrics whose magnitude exceeds its limit, or is NaN: `["grad_norm", "update_kl"]`. `kl_above`
    is the setting `above` of [monitor.kl]."""
    limits = _SPIKE_LIMITS | dict.fromkeys(_SPIKE_DIVERGENCES, kl_above)
    return [name for name, limit in limits.items() if not abs(metrics.get(name, 0.0)) <= limit]
