"""[engine], [sampling] and [monitor]: how completions are generated, and which of them are kept."""

from pydantic import Field

from nmoe.config.base import Section


class EngineSection(Section):
    """[engine]: how rollouts are generated."""

    max_sequences: int = Field(default=256, gt=0, description="the most sequences that are generated side by side")
    cache_mb: int = Field(
        default=0, ge=0, description="memory of the key-value cache; 0: what max_sequences need, at most 4096"
    )


class SamplingSection(Section):
    """[sampling]: the distribution that completions are drawn from."""

    max_new_tokens: int = Field(default=256, gt=0, description="the most tokens of one completion")
    temperature: float = Field(default=1.0, ge=0, description="0: always the most likely token")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="smallest set of tokens with this much probability; 1: off"
    )
    top_k: int = Field(default=0, ge=0, description="only so many most likely tokens; 0: off")


class SampleRateSection(Section):
    """[monitor] of what samples: self-play takes this key alone."""

    replay_sample_rate: float = Field(
        default=0.001, ge=0, le=1, description="share of all trajectories kept as replay bundles"
    )


class MonitorSection(SampleRateSection):
    """[monitor]: what a run keeps of its rollouts, to look into later."""

    replays_per_failure: int = Field(
        default=1, ge=0, description="replay bundles kept of each class of failure and step, in addition"
    )
