"""[monitor]: the rules that watch a run's metrics, one table each, and which rollouts are kept as replay bundles.

docs/playbook.md says what each rule means and what to try when it fires.
"""

from typing import Literal

from pydantic import Field

from nmoe.config.base import Section

Level = Literal["warn", "stop", "off"]


class RuleSection(Section):
    """The keys of every rule."""

    level: Level = "warn"
    """warn: say so and go on; stop: save and end the run; off: not watched"""
    steps: int = Field(default=5, gt=0)
    """steps in a row that show the symptom before the rule fires"""


class AboveSection(RuleSection):
    """A rule that fires above a value."""

    above: float = Field(default=0.0, ge=0)
    """the value above which a step shows the symptom"""


class GradNormSection(AboveSection):
    """[monitor.grad_norm]: the norm of the gradient is 0, or far above what a step can use."""

    above: float = Field(default=100.0, ge=0)
    """the norm, before clipping, above which a step shows the symptom"""
    steps: int = Field(default=3, gt=0)


class GradNormRiseSection(RuleSection):
    """[monitor.grad_norm_rise]: the highest norm of each stretch of steps rises from stretch to stretch."""

    steps: int = Field(default=10, gt=0)
    """steps of a stretch"""
    stretches: int = Field(default=4, ge=3)
    """stretches in a row whose highest norm rises"""
    factor: float = Field(default=10.0, gt=1)
    """the last highest norm over the first"""


class ExpertsSection(RuleSection):
    """[monitor.experts]: the experts of a layer collapse."""

    violation: float = Field(default=2.0, gt=0)
    """excess load of the busiest expert, in fair shares (expert_load_max_violation)"""
    dead: float = Field(default=0.5, gt=0, le=1)
    """share of a layer's experts that have nothing to do"""
    warmup_steps: int = Field(default=10, ge=0)
    """first steps, which are not looked at: a fresh router is uneven"""
    balance_steps: int = Field(default=60, ge=0)
    """first steps in which idle experts alone count: a fresh router that is healthy needs them to balance its load"""


class DiskSection(RuleSection):
    """[monitor.disk]: the disk of the run's directory is nearly full."""

    steps: int = Field(default=1, gt=0)
    free_gb: float = Field(default=1.0, gt=0)
    """free space below which a step shows the symptom"""


class SlowDiskSection(RuleSection):
    """[monitor.slow_disk]: saving holds the run up."""

    steps: int = Field(default=1, gt=0)
    """saves in a row that show the symptom before the rule fires"""
    share: float = Field(default=0.5, gt=0)
    """seconds by which a save delayed the run, over the seconds of the steps before it"""
    seconds: float = Field(default=10.0, gt=0)
    """and at least this long"""


class StalledSection(RuleSection):
    """[monitor.stalled]: a step takes far longer than the others."""

    steps: int = Field(default=1, gt=0)
    factor: float = Field(default=10.0, gt=1)
    """how many times the median of the steps before"""
    seconds: float = Field(default=300.0, gt=0)
    """and at least this long"""


class MemorySection(AboveSection):
    """[monitor.memory]: the memory of the run's GPU is nearly full. Only where there is one."""

    above: float = Field(default=0.95, gt=0, le=1)
    """share of the GPU's memory in use at a step's peak"""
    steps: int = Field(default=2, gt=0)


class IdleSection(RuleSection):
    """[monitor.idle]: the run's GPU has nothing to do for minutes. Only where there is one."""

    steps: int = Field(default=1, gt=0)
    seconds: float = Field(default=120.0, gt=0)
    """the pause that a step has at least"""


class TruncationSection(AboveSection):
    """[monitor.truncation]: most completions are cut at the token limit."""

    above: float = Field(default=0.5, ge=0, le=1)
    """share of the completions that are cut"""


class ClipSection(AboveSection):
    """[monitor.clip]: most of an update is clipped."""

    above: float = Field(default=0.4, ge=0, le=1)
    """share of the tokens that are clipped, or would be in another update"""
    steps: int = Field(default=3, gt=0)


class RewardStuckSection(RuleSection):
    """[monitor.reward_stuck]: rewards do not differ, so that nothing can be learned."""

    steps: int = Field(default=10, gt=0)


class FlatSection(RuleSection):
    """[monitor.flat]: the mean reward of ten steps does not rise beyond its noise while problems are still unsolved."""

    steps: int = Field(default=50, ge=10)
    """steps without a rise before the rule fires"""
    solved: float = Field(default=0.8, gt=0, le=1)
    """correctness from which a flat reward is no symptom"""


class SolveRateSection(RuleSection):
    """[monitor.solve_rate]: hardly any problem is solved."""

    below: float = Field(default=0.05, gt=0, le=1)
    """correctness below which a step shows the symptom"""
    steps: int = Field(default=10, gt=0)


class RatiosSection(AboveSection):
    """[monitor.ratios]: an update changes a token's probability many times over."""

    above: float = Field(default=10.0, ge=0)
    """ratio_max or update_ratio_max of a step that shows the symptom"""
    log_ratio: float = Field(default=5.0, gt=0)
    """log_ratio_raw_max, or update_log_ratio_max or _min in either direction, of a step that shows the symptom"""
    steps: int = Field(default=3, gt=0)


class FormatSection(RuleSection):
    """[monitor.format]: the required format is rare, or is being lost. Only with right answers, or a reward for the format."""

    below: float = Field(default=0.5, ge=0, le=1)
    """share of the completions in the required format"""
    boxed: float = Field(default=0.9, ge=0, le=1)
    """share of the completions with a box (has_boxed), where the environment asks for one and rewards right answers alone"""
    drop: float = Field(default=0.2, gt=0, le=1)
    """loss, against the best five steps before"""


class KLSection(AboveSection):
    """[monitor.kl]: the policy moves too far in one step, or its divergence estimate stays negative."""

    above: float = Field(default=0.1, ge=0)
    """|ppo_kl| or update_kl of a step that shows the symptom; update_kl ten times as large fires at once"""
    negative_steps: int = Field(default=10, gt=0)
    """steps in a row with a negative ppo_kl"""
    steps: int = Field(default=2, gt=0)
    """steps in a row beyond `above` before the rule fires"""


class ReferenceSection(AboveSection):
    """[monitor.reference]: the policy is far from its reference. Only where there is one."""

    above: float = Field(default=1.0, ge=0)
    """reference_kl of a step that shows the symptom"""
    log_ratio: float = Field(default=8.0, gt=0)
    """reference_log_ratio_abs_p99 of a step that shows the symptom"""
    steps: int = Field(default=3, gt=0)


class EntropySection(RuleSection):
    """[monitor.entropy]: samples become alike while problems are still unsolved."""

    share: float = Field(default=0.1, gt=0, lt=1)
    """of the entropy of the first five steps"""
    solved: float = Field(default=0.8, gt=0, le=1)
    """correctness from which low entropy is no symptom"""


class LengthSection(RuleSection):
    """[monitor.length]: completions shrink to a fraction of their length, or grow to a multiple."""

    factor: float = Field(default=3.0, gt=1)
    """against the mean of the first five steps, in either direction"""


class ProbeSection(RuleSection):
    """[monitor.probe]: held-out problems are solved less than before."""

    steps: int = Field(default=2, gt=0)
    """evaluations in a row, each worse than the best before or the first by more than chance, paired by problem"""
    drop: float = Field(default=0.02, ge=0, le=1)
    """and by at least this share of the problems"""


class HackingSection(AboveSection):
    """[monitor.reward_hacking]: samples that are wrong earn a high reward, after the format is learned. Where right answers alone
    are rewarded one such sample is a bug, and the rule fires at once."""

    above: float = Field(default=0.2, ge=0, le=1)
    """share of the samples that are wrong and highly rewarded"""


class MismatchSection(AboveSection):
    """[monitor.mismatch]: the engine's log-probabilities are not the learner's."""

    above: float = Field(default=0.0, ge=0)
    """mismatch_abs_mean, which beyond one nat of entropy is taken over its square root; 0: 1e-4 in float32, 0.05 in half precision,
    and any difference with exact numerics"""
    growth: float = Field(default=4.0, gt=1)
    """mismatch_abs_mean over the square root of entropy_mean, over the lowest mean of five steps so far; from a tenth of
    `above` on"""
    steps: int = Field(default=2, gt=0)
    """measured steps in a row that show the symptom before the rule fires"""


class WatchSection(Section):
    """[monitor]: the rules that watch a run."""

    grad_norm: GradNormSection = GradNormSection()
    """a gradient of 0, or a huge one"""
    grad_norm_rise: GradNormRiseSection = GradNormRiseSection()
    """ever larger gradients"""
    experts: ExpertsSection = ExpertsSection()
    """collapsing experts"""
    disk: DiskSection = DiskSection()
    """a disk that is nearly full"""
    slow_disk: SlowDiskSection = SlowDiskSection()
    """saving holds the run up"""
    stalled: StalledSection = StalledSection()
    """a step that takes far too long"""
    memory: MemorySection = MemorySection()
    """a GPU whose memory is nearly full"""
    idle: IdleSection = IdleSection()
    """a GPU that has nothing to do"""


class SampleRateSection(WatchSection):
    """[monitor] of self-play."""

    replay_sample_rate: float = Field(default=0.001, ge=0, le=1)
    """share of all trajectories kept as replay bundles"""


class MonitorSection(SampleRateSection):
    """[monitor]: the rules that watch a run, and which rollouts it keeps as replay bundles."""

    first_steps: Literal["warn", "stop"] = "warn"
    """stop: the smoke rules (reward_stuck, format, truncation, grad_norm, clip) end the run if they fire in its first 10 steps;
    warn: their levels decide"""
    replays_per_failure: int = Field(default=1, ge=0)
    """additional replay bundles per step and failure class"""
    reward_stuck: RewardStuckSection = RewardStuckSection()
    """rewards without a difference"""
    flat: FlatSection = FlatSection()
    """a reward that does not rise"""
    solve_rate: SolveRateSection = SolveRateSection()
    """problems of which hardly any is solved"""
    format: FormatSection = FormatSection()
    """a format that is rare or being lost"""
    truncation: TruncationSection = TruncationSection()
    """completions cut at the limit"""
    clip: ClipSection = ClipSection()
    """updates that are clipped away"""
    kl: KLSection = KLSection()
    """a policy that moves too far at once"""
    ratios: RatiosSection = RatiosSection()
    """tokens whose probability leaps"""
    reference: ReferenceSection = ReferenceSection()
    """a policy that is far from its reference"""
    entropy: EntropySection = EntropySection()
    """samples that become alike"""
    length: LengthSection = LengthSection()
    """completions that shrink or grow"""
    probe: ProbeSection = ProbeSection()
    """held-out problems that are lost again"""
    reward_hacking: HackingSection = HackingSection()
    """high rewards for wrong answers"""
    mismatch: MismatchSection = MismatchSection()
    """an engine that is not the learner"""
