"""Who holds which block of the cache, and which blocks hold a prefix that another sequence can use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_ROOT = 0


class BlockManager:
    """Blocks of `block_tokens` positions each, counted by reference.

    A full block can be remembered under the tokens it holds and all before them. It stays findable after its last holder let
    go, until its place is needed: what was let go first goes first. Remembered prefixes form a tree of exact tokens, so that no
    collision of hashes can hand out another prompt's keys.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks, self.block_tokens = blocks, block_tokens
        self._holders = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # remembered blocks that nobody holds
        self._nodes: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (parent node, tokens) -> (node, block)
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its entry in _nodes
        self._last_node = _ROOT
        self.touched = 0  # blocks from here on have never been taken

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> list[int]:
        """`count` blocks of unknown contents, each held once. The caller has looked at `available`."""
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                del self._nodes[self._keys.pop(block)]
            self._holders[block] = 1
            taken.append(block)
        self.touched = max([self.touched, *(block + 1 for block in taken)])
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each. The last blocks of a prefix are let go first: without its beginning none is found."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, token_ids: Sequence[int], most: int) -> list[int]:
        """The longest remembered prefix in whole blocks, at most `most` tokens of it; its blocks are held once more."""
        found: list[int] = []
        node = _ROOT
        for start in range(0, min(most, len(token_ids)) - self.block_tokens + 1, self.block_tokens):
            entry = self._nodes.get((node, tuple(token_ids[start : start + self.block_tokens])))
            if entry is None:
                break
            node, block = entry
            found.append(block)
        self.hold(found)
        return found

    def remember(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Makes the full blocks of a sequence findable. Where a prefix is known already, its first block stays the known one."""
        node = _ROOT
        for i in range(len(token_ids) // self.block_tokens):
            key = (node, tuple(token_ids[i * self.block_tokens : (i + 1) * self.block_tokens]))
            entry = self._nodes.get(key)
            if entry is None:
                if blocks[i] in self._keys:  # held under a forgotten parent
                    return
                self._last_node += 1
                entry = self._nodes[key] = (self._last_node, blocks[i])
                self._keys[blocks[i]] = key
            node = entry[0]

    def forget(self) -> None:
        """Nothing is findable any more: the weights have changed. Whoever holds a block keeps it."""
        self._nodes.clear()
        self._keys.clear()
        self._free.extend(self._idle)
        self._idle.clear()
