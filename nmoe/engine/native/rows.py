"""The running sequences' state as columns of tensors, so that a step touches no sequence one by one. Row i is cache row i."""

# Shapes: S rows, P positions, Z stop ids.

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

_NO_STOP = -1


@dataclass
class Rows:
    """Columns over S rows, of which the first `running` are in use."""

    last_token: Tensor  # [S] the token to feed next
    position: Tensor  # [S] the position it will take
    generated: Tensor  # [S] tokens sampled so far
    limit: Tensor  # [S] tokens to sample at most
    temperature: Tensor  # [S]
    top_p: Tensor  # [S]
    top_k: Tensor  # [S]
    stop_ids: Tensor  # [S, Z], filled up with -1
    uniforms: Tensor  # [S, P] the draw for every token to come
    tokens: Tensor  # [S, P] what was sampled
    logprobs: Tensor  # [S, P]
    versions: Tensor  # [S, P]

    @classmethod
    def allocate(cls, rows: int, positions: int, device: torch.device) -> Rows:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=device)

        return cls(
            last_token=integers(rows),
            position=integers(rows),
            generated=integers(rows),
            limit=integers(rows),
            temperature=floats(rows),
            top_p=floats(rows),
            top_k=integers(rows),
            stop_ids=torch.full((rows, 1), _NO_STOP, dtype=torch.int64, device=device),
            uniforms=floats(rows, positions),
            tokens=integers(rows, positions),
            logprobs=floats(rows, positions),
            versions=integers(rows, positions),
        )

    def set_stop_ids(self, rows: slice, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            filler = torch.full((self.stop_ids.shape[0], missing), _NO_STOP, device=self.stop_ids.device)
            self.stop_ids = torch.cat([self.stop_ids, filler], 1)
        self.stop_ids[rows] = _NO_STOP
        self.stop_ids[rows, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64, device=self.stop_ids.device)

    def move(self, targets: Tensor, sources: Tensor) -> None:
        for f in fields(self):
            column = getattr(self, f.name)
            column[targets] = column[sources]

    def record(self, running: slice, tokens_B: Tensor, logprobs_B: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Notes one more token per row of `running`; returns which rows met a stop id and which are finished, `[B]` each."""
        rows = torch.arange(running.start, running.stop, device=tokens_B.device)
        at_B = self.generated[running]
        self.tokens[rows, at_B] = tokens_B
        self.logprobs[rows, at_B] = logprobs_B
        self.versions[rows, at_B] = version
        self.last_token[running] = tokens_B
        at_B += 1
        stopped_B = (tokens_B.unsqueeze(-1) == self.stop_ids[running]).any(-1)
        return stopped_B, stopped_B | (at_B >= self.limit[running])
