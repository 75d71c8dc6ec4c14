"""[monitor]: the rules that watch a run's metrics, one table each, and which rollouts are kept to be replayed.

docs/playbook.md says what each rule means and what to try when it fires.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section

Level = Literal["warn", "stop", "off"]


class RuleSection(Section):
    """The keys that every rule has."""

    level: Level = "warn"
    """warn: report and continue; stop: save and end the run; off: no check"""
    steps: int = Field(default=5, gt=0)
    """steps in a row that show the symptom before the rule fires"""


class AboveSection(RuleSection):
    """A rule about a metric that should stay below a limit."""

    above: float = Field(default=0.0, ge=0)
    """the value above which a step shows the symptom"""


class GradNormSection(AboveSection):
    """[monitor.grad_norm]: warns when the gradient's norm is 0, or too large for a useful step."""

    above: float = Field(default=100.0, ge=0)
    """the norm, before clipping, above which a step shows the symptom"""
    steps: int = Field(default=3, gt=0)


class GradNormRiseSection(RuleSection):
    """[monitor.grad_norm_rise]: warns when the maximum gradient norm rises over consecutive stretches of steps."""

    steps: int = Field(default=10, gt=0)
    """length of a stretch in steps"""
    stretches: int = Field(default=4, ge=3)
    """number of stretches in a row with a rising maximum norm before the rule fires"""
    factor: float = Field(default=10.0, gt=1)
    """the maximum of the last stretch over the maximum of the first, beyond which the rule fires"""


class ExpertsSection(RuleSection):
    """[monitor.experts]: warns when the router sends most tokens of a layer to few experts, or none to many of them."""

    violation: float = Field(default=2.0, gt=0)
    """excess load of the busiest expert, as a multiple of an equal share (expert_load_max_violation)"""
    dead: float = Field(default=0.5, gt=0, le=1)
    """share of a layer's experts that receive no tokens"""
    warmup_steps: int = Field(default=10, ge=0)
    """first steps, which are ignored, because a new router is unbalanced"""
    balance_steps: int = Field(default=60, ge=0)
    """first steps in which only idle experts count: a healthy new router needs them to balance its load"""


class DiskSection(RuleSection):
    """[monitor.disk]: warns when the disk of the run's directory is nearly full."""

    steps: int = Field(default=1, gt=0)
    free_gb: float = Field(default=1.0, gt=0)
    """free space below which a step shows the symptom"""


class SlowDiskSection(RuleSection):
    """[monitor.slow_disk]: warns when writing checkpoints delays the run."""

    steps: int = Field(default=1, gt=0)
    """saves in a row that show the symptom before the rule fires"""
    share: float = Field(default=0.5, gt=0)
    """a save is slow if it delays the run by at least this share of the time of the steps since the last save"""
    seconds: float = Field(default=10.0, gt=0)
    """and by at least this many seconds"""


class StalledSection(RuleSection):
    """[monitor.stalled]: warns when a step takes far longer than the others."""

    steps: int = Field(default=1, gt=0)
    factor: float = Field(default=10.0, gt=1)
    """duration of the step, as a multiple of the median of earlier steps, from which it shows the symptom"""
    seconds: float = Field(default=300.0, gt=0)
    """and at least this many seconds"""


class MemorySection(AboveSection):
    """[monitor.memory]: warns when the GPU's memory is nearly full (only on a GPU)."""

    above: float = Field(default=0.95, gt=0, le=1)
    """peak share of the GPU's memory in use, above which a step shows the symptom"""
    steps: int = Field(default=2, gt=0)


class IdleSection(RuleSection):
    """[monitor.idle]: warns when the GPU is idle for minutes (only on a GPU)."""

    steps: int = Field(default=1, gt=0)
    seconds: float = Field(default=120.0, gt=0)
    """idle time in seconds from which a step shows the symptom"""


class TruncationSection(AboveSection):
    """[monitor.truncation]: warns when most completions are cut at the token limit."""

    above: float = Field(default=0.5, ge=0, le=1)
    """share of completions cut at the limit, above which a step shows the symptom"""


class ClipSection(AboveSection):
    """[monitor.clip]: warns when most tokens of an update are clipped."""

    above: float = Field(default=0.4, ge=0, le=1)
    """share of tokens clipped in the updates, or outside the clip range after them, above which a step shows the symptom"""
    steps: int = Field(default=3, gt=0)


class RewardStuckSection(RuleSection):
    """[monitor.reward_stuck]: warns when in every group of a step all rewards are equal, so that nothing can be learned."""

    steps: int = Field(default=10, gt=0)


class FlatSection(RuleSection):
    """[monitor.flat]: warns when the mean reward of ten steps has not risen by more than its noise for many steps, unless most
    problems are solved."""

    steps: int = Field(default=50, ge=10)
    """steps without a rise before the rule fires"""
    solved: float = Field(default=0.8, gt=0, le=1)
    """correctness from which a flat reward is accepted"""


class SolveRateSection(RuleSection):
    """[monitor.solve_rate]: warns when hardly any problem is solved, or a rate outside a band that the problems are meant for."""

    below: float = Field(default=0.05, gt=0, le=1)
    """correctness below which a step shows the symptom"""
    band: Array[float] | None = None
    """lowest and highest correctness of a healthy step, such as [0.2, 0.6] for problems of AIME's difficulty; default: no band"""
    steps: int = Field(default=10, gt=0)

    def conflicts(self) -> Iterator[Conflict]:
        if self.band is not None and not (len(self.band) == 2 and 0 <= self.band[0] < self.band[1] <= 1):
            yield Conflict("band", "must be two rates between 0 and 1, the lower one first, such as [0.2, 0.6]")


class RatiosSection(AboveSection):
    """[monitor.ratios]: warns when an update multiplies a token's probability many times over."""

    above: float = Field(default=10.0, ge=0)
    """limit on ratio_max and update_ratio_max, beyond which a step shows the symptom"""
    log_ratio: float = Field(default=5.0, gt=0)
    """limit on log_ratio_raw_max, update_log_ratio_max and the magnitude of update_log_ratio_min, beyond which a step shows the
    symptom"""
    steps: int = Field(default=3, gt=0)


class FormatSection(RuleSection):
    """[monitor.format]: warns when few completions have the required format, or fewer than before (only if right answers or the
    format are rewarded)."""

    below: float = Field(default=0.5, ge=0, le=1)
    """share of completions in the required format, below which a step shows the symptom"""
    boxed: float = Field(default=0.9, ge=0, le=1)
    """share of completions with a box (has_boxed), below which a step shows the symptom, where the environment asks for a box
    and rewards only right answers"""
    drop: float = Field(default=0.2, gt=0, le=1)
    """drop of the share in the required format from its best mean of five steps, beyond which a step shows the symptom"""


class KLSection(AboveSection):
    """[monitor.kl]: warns when the policy moves too far in one step, or its KL estimate stays negative."""

    above: float = Field(default=0.1, ge=0)
    """limit on |ppo_kl| and update_kl, beyond which a step shows the symptom; an update_kl ten times as large fires at once"""
    negative_steps: int = Field(default=10, gt=0)
    """steps in a row with a negative ppo_kl before the rule fires"""
    steps: int = Field(default=2, gt=0)
    """steps in a row beyond `above` before the rule fires"""


class ReferenceSection(AboveSection):
    """[monitor.reference]: warns when the policy is far from its reference model (only with a reference)."""

    above: float = Field(default=1.0, ge=0)
    """limit on reference_kl, beyond which a step shows the symptom"""
    log_ratio: float = Field(default=8.0, gt=0)
    """limit on reference_log_ratio_abs_p99, beyond which a step shows the symptom"""
    steps: int = Field(default=3, gt=0)


class EntropySection(RuleSection):
    """[monitor.entropy]: warns when samples lose diversity before the problems are solved."""

    share: float = Field(default=0.1, gt=0, lt=1)
    """share of the first five steps' mean entropy, below which a step shows the symptom"""
    solved: float = Field(default=0.8, gt=0, le=1)
    """correctness from which low entropy is accepted"""


class LengthSection(RuleSection):
    """[monitor.length]: warns when completions become several times shorter or longer than at the start."""

    factor: float = Field(default=3.0, gt=1)
    """ratio to the first five steps' mean length, in either direction, beyond which a step shows the symptom"""


class ProbeSection(RuleSection):
    """[monitor.probe]: warns when the model solves fewer held-out problems than before."""

    steps: int = Field(default=2, gt=0)
    """evaluations in a row that are significantly worse than the best or first one, compared problem by problem"""
    drop: float = Field(default=0.02, ge=0, le=1)
    """and by at least this share of the problems"""


class HackingSection(AboveSection):
    """[monitor.reward_hacking]: warns when wrong answers earn high rewards, once the format is learned. If only right answers
    are rewarded, one such sample is a bug, and the rule fires at once."""

    above: float = Field(default=0.2, ge=0, le=1)
    """share of samples that are wrong and highly rewarded, above which a step shows the symptom"""


class MismatchSection(AboveSection):
    """[monitor.mismatch]: warns when the engine's log-probabilities differ from the learner's by more than rounding."""

    above: float = Field(default=0.0, ge=0)
    """limit on mismatch_abs_mean, scaled by the square root of the entropy above one nat; 0: 1e-4 in float32, 0.05 in half
    precision, and any difference with exact numerics"""
    growth: float = Field(default=4.0, gt=1)
    """limit on the growth of mismatch_abs_mean / sqrt(entropy_mean), relative to its lowest mean of five steps; checked only
    from a tenth of `above` on"""
    steps: int = Field(default=2, gt=0)
    """measured steps in a row that show the symptom before the rule fires"""


class WatchSection(Section):
    """[monitor]: the rules that watch a run."""

    grad_norm: GradNormSection = GradNormSection()
    """a gradient that is 0, or too large"""
    grad_norm_rise: GradNormRiseSection = GradNormRiseSection()
    """gradient norms that keep rising"""
    experts: ExpertsSection = ExpertsSection()
    """a router that sends most tokens to few experts"""
    disk: DiskSection = DiskSection()
    """a disk that is nearly full"""
    slow_disk: SlowDiskSection = SlowDiskSection()
    """checkpoints that delay the run"""
    stalled: StalledSection = StalledSection()
    """a step that takes far longer than the others"""
    memory: MemorySection = MemorySection()
    """a GPU whose memory is nearly full"""
    idle: IdleSection = IdleSection()
    """a GPU that is idle for minutes"""


class SampleRateSection(WatchSection):
    """[monitor] of self-play."""

    replay_sample_rate: float = Field(default=0.001, ge=0, le=1)
    """share of all trajectories kept as replay bundles"""


class MonitorSection(SampleRateSection):
    """[monitor]: the rules that watch a run, and which rollouts it keeps as replay bundles."""

    first_steps: Literal["warn", "stop"] = "warn"
    """stop: end the run if a smoke-test rule (reward_stuck, format, truncation, grad_norm, clip) fires in its first 10 steps;
    warn: each rule's `level` applies"""
    samples: Literal["first", "all"] = "first"
    """first: samples/ records the first group of a step; all: every sample, and beside it advantage, log-probability, entropy, loss
    weight, gradient and experts of each token"""
    samples_share: float = Field(default=1.0, gt=0, le=1)
    """with "all", share of the groups after a step's first one that are recorded"""
    samples_mb: int = Field(default=2000, gt=0)
    """with "all", size of samples/ in MB, from which on only the first group of a step is recorded"""
    replays_per_failure: int = Field(default=1, ge=0)
    """additional replay bundles per step and failure class"""
    reward_stuck: RewardStuckSection = RewardStuckSection()
    """equal rewards, from which nothing can be learned"""
    flat: FlatSection = FlatSection()
    """a reward that does not rise"""
    solve_rate: SolveRateSection = SolveRateSection()
    """hardly any problem solved"""
    format: FormatSection = FormatSection()
    """few completions in the required format, or fewer than before"""
    truncation: TruncationSection = TruncationSection()
    """completions cut at the limit"""
    clip: ClipSection = ClipSection()
    """updates with mostly clipped tokens"""
    kl: KLSection = KLSection()
    """a policy that moves too far in one step"""
    ratios: RatiosSection = RatiosSection()
    """tokens whose probability an update multiplies"""
    reference: ReferenceSection = ReferenceSection()
    """a policy far from its reference model"""
    entropy: EntropySection = EntropySection()
    """samples that lose diversity"""
    length: LengthSection = LengthSection()
    """completions that become much shorter or longer"""
    probe: ProbeSection = ProbeSection()
    """held-out problems that are solved less than before"""
    reward_hacking: HackingSection = HackingSection()
    """high rewards for wrong answers"""
    mismatch: MismatchSection = MismatchSection()
    """engine log-probabilities that differ from the learner's"""
