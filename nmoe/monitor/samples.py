"""Rules about the samples of a run: their format, truncation, length and diversity."""

from __future__ import annotations

from nmoe.config.tables.monitor import EntropySection, FormatSection, LengthSection, TruncationSection
from nmoe.monitor.monitor import Baseline, Metrics, Rule


class FormatRule(Rule[FormatSection]):
    """Fires when few completions have the required format, or fewer than before."""

    name = "format"
    smoke = True
    source = "training guidelines, early smoke-test criteria: has_boxed above 50% and not dropping; tier 1: it stays above 90%"
    remedies = (
        "look at the failures in samples/ and `failures/parse_error`",
        "teach the format by a small SFT phase",
        "weigh the format more in [rubric]",
    )

    def __init__(self, settings: FormatSection, boxes: bool = False) -> None:
        r"""Makes the rule. With `boxes`, answers belong in a \boxed{} and only right answers are rewarded, so that
        missing boxes are a symptom."""
        super().__init__(settings)
        self._boxes = boxes
        self._last: list[float] = []
        self._best = 0.0

    def symptom(self, metrics: Metrics) -> str | None:
        rate = metrics.get("format_ok")
        if rate is None:
            return None
        self._last = [*self._last[-4:], rate]
        if len(self._last) == 5:
            best, self._best = self._best, max(self._best, sum(self._last) / 5)
            if rate < best - self.settings.drop:
                return f"{rate:.0%} of the completions have the required format, and {best:.0%} had it"
        if rate < self.settings.below:
            return f"only {rate:.0%} of the completions have the required format"
        boxed = metrics.get("has_boxed", 1.0)
        if self._boxes and boxed < self.settings.boxed:
            return f"only {boxed:.0%} of the completions have a box, which the answer belongs in"
        return None


class TruncationRule(Rule[TruncationSection]):
    """Fires when most completions are cut at the token limit."""

    name = "truncation"
    smoke = True
    source = "training guidelines, early smoke-test criteria: truncated below 50%; tuning playbook, high truncation"
    remedies = (
        "raise sampling.max_new_tokens",
        "give efficiency a weight in [rubric], or set algorithm.overlong_buffer",
        "teach shorter answers by a small SFT phase",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        cut = metrics.get("truncated")
        return (
            f"{cut:.0%} of the completions are cut at the token limit"
            if cut is not None and cut > self.settings.above
            else None
        )


class LengthRule(Rule[LengthSection]):
    """Fires when completions become several times shorter or longer than at the start."""

    name = "length"
    source = "training guidelines, tier 3: response length; tuning playbook, length collapse"
    remedies = (
        "read samples/: a reward may pay for length alone",
        "give efficiency a weight in [rubric] against growth; weigh correctness more against collapse",
        "raise algorithm.kl_coef",
    )

    def __init__(self, settings: LengthSection) -> None:
        super().__init__(settings)
        self._start = Baseline(5)

    def symptom(self, metrics: Metrics) -> str | None:
        length = metrics.get("response_length_mean")
        if length is None or (start := self._start.mean(length)) is None:
            return None
        if start / self.settings.factor <= length <= start * self.settings.factor:
            return None
        return f"completions have {length:.1f} tokens and had {start:.1f}"


class EntropyRule(Rule[EntropySection]):
    """Fires when samples lose diversity (low entropy) before the problems are solved."""

    name = "entropy"
    source = "training guidelines, tier 2: entropy_mean, diversity collapse"
    remedies = (
        "lower optimizer.learning_rate",
        "raise algorithm.kl_coef, or set algorithm.entropy_coef",
        "raise sampling.temperature",
    )

    def __init__(self, settings: EntropySection) -> None:
        super().__init__(settings)
        self._start = Baseline(5)

    def symptom(self, metrics: Metrics) -> str | None:
        entropy, solved = metrics.get("entropy_mean"), metrics.get("correctness", 0.0)
        if entropy is None or (start := self._start.mean(entropy)) is None or solved >= self.settings.solved:
            return None
        if entropy >= self.settings.share * start:
            return None
        return f"the entropy is {entropy:.3g} and began at {start:.3g}, with {solved:.0%} solved"
