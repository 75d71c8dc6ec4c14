"""[engine] and [sampling]: how completions are generated."""

from pydantic import Field

from nmoe.config.base import Section


class EngineSection(Section):
    """[engine]: how rollouts are generated."""

    max_sequences: int = Field(default=256, gt=0, description="maximum number of sequences generated at once")
    cache_mb: int = Field(
        default=0,
        ge=0,
        description="memory of the key-value cache; 0: enough for max_sequences, at most 4096 on a CPU and, on a GPU, 0.4 of "
        "what is free beside training and 0.85 without",
    )


class SamplingSection(Section):
    """[sampling]: the distribution that completions are drawn from."""

    max_new_tokens: int = Field(default=256, gt=0, description="maximum tokens per completion")
    temperature: float = Field(default=1.0, ge=0, description="0: greedy")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the smallest set of tokens with this much probability; 1: off"
    )
    top_k: int = Field(default=0, ge=0, description="sample from this many of the most likely tokens; 0: off")
