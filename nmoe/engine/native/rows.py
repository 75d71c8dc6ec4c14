"""The running sequences' state as columns, so that a step touches no sequence one by one. What decides on scheduling lies on the
host, what sampling needs on the device."""

# Shapes: S rows, P tokens a row can sample, Z stop ids, M blocks a row can hold.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NO_STOP = -1


class Rows:
    """Columns over S rows, of which the first ones are in use.

    On the host: `position` that the last token will take, `generated` tokens so far and their `limit`, and the `table` of cache
    blocks, of which a row holds `held`. On the device: `last_token`, the sampling settings, the `uniforms` drawn for every
    token to come, and what was sampled: `tokens`, `logprobs`, `versions`.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self.device = device
        self.position, self.generated, self.limit, self.held = np.zeros((4, rows), dtype=np.int64)
        self.table = np.zeros((rows, blocks), dtype=np.int64)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=device)

        self.columns: dict[str, Tensor] = {
            "last_token": integers(rows),
            "temperature": floats(rows),
            "top_p": floats(rows),
            "top_k": integers(rows),
            "stop_ids": torch.full((rows, 1), _NO_STOP, dtype=torch.int64, device=device),
            "uniforms": floats(rows, 0),
            "tokens": integers(rows, 0),
            "logprobs": floats(rows, 0),
            "versions": integers(rows, 0),
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def make_room(self, tokens: int) -> None:
        """Lets every row sample this many tokens."""
        old = self["tokens"].shape[1]
        if tokens > old:
            wider = max(tokens, 2 * old)
            for name in ("uniforms", "tokens", "logprobs", "versions"):
                column = self[name]
                self.columns[name] = torch.cat([column, column.new_zeros(column.shape[0], wider - old)], 1)

    def set_stop_ids(self, rows: slice, stop_ids: tuple[int, ...]) -> None:
        column = self["stop_ids"]
        missing = len(stop_ids) - column.shape[1]
        if missing > 0:
            filler = torch.full((column.shape[0], missing), _NO_STOP, device=self.device)
            column = self.columns["stop_ids"] = torch.cat([column, filler], 1)
        column[rows] = _NO_STOP
        column[rows, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64, device=self.device)

    def set_blocks(self, row: int, blocks: Sequence[int]) -> None:
        self.table[row, : len(blocks)] = blocks
        self.held[row] = len(blocks)

    def blocks(self, row: int) -> list[int]:
        held: list[int] = self.table[row, : self.held[row]].tolist()
        return held

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        for host in (self.position, self.generated, self.limit, self.held, self.table):
            host[list(targets)] = host[list(sources)]
        to, of = (torch.tensor(rows, device=self.device) for rows in (targets, sources))
        for column in self.columns.values():
            column[to] = column[of]

    def record(self, running: slice, tokens_B: Tensor, logprobs_B: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Notes one more token per row of `running`; returns which rows met a stop id and which are finished, `[B]` each."""
        rows = torch.arange(running.start, running.stop, device=self.device)
        at_B = torch.from_numpy(self.generated[running]).to(self.device)
        self["tokens"][rows, at_B] = tokens_B
        self["logprobs"][rows, at_B] = logprobs_B
        self["versions"][rows, at_B] = version
        self["last_token"][running] = tokens_B
        self.generated[running] += 1
        stopped_B = (tokens_B.unsqueeze(-1) == self["stop_ids"][running]).any(-1)
        full_B = torch.from_numpy(self.generated[running] >= self.limit[running]).to(self.device)
        return stopped_B, stopped_B | full_B
