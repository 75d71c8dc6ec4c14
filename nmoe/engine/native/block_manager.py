"""The block manager: it records which blocks and state slots of the cache are in use, and which blocks hold a prefix that other
sequences can share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_ROOT = 0


class BlockManager:
    """Hands out the cache's blocks of `block_tokens` positions each, which may have several holders, and its state slots, each of
    which belongs to one sequence or prompt.

    A full block can be remembered under its tokens and all tokens before them. It stays findable after its last holder released it,
    until it is needed for other tokens; the block released first is reused first. Remembered prefixes form a tree of exact tokens,
    so that a hash collision cannot hand out another prompt's keys. Without `shares_prefixes` nothing is remembered.
    """

    def __init__(self, blocks: int, block_tokens: int, state_slots: int, shares_prefixes: bool = True) -> None:
        self.blocks, self.block_tokens, self.shares_prefixes = blocks, block_tokens, shares_prefixes
        self.state_slots, self._free_state_slots = state_slots, list(range(state_slots - 1, -1, -1))
        self._holders = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # remembered blocks without a holder
        self._nodes: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (parent node, tokens) -> (node, block)
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its entry in _nodes
        self._last_node = _ROOT
        self.touched = 0  # blocks from here on have never been taken

    @property
    def available(self) -> int:
        """The number of blocks that can be taken: free ones, and ones that hold a remembered prefix and have no holder."""
        return len(self._free) + len(self._idle)

    @property
    def available_state_slots(self) -> int:
        """The number of free state slots. A slot holds the states of all recurrent layers for one sequence."""
        return len(self._free_state_slots)

    def take_state_slot(self) -> int:
        """Takes a state slot of unknown content and returns its index. The caller has to check `available_state_slots` first."""
        return self._free_state_slots.pop()

    def most_copies(self, tokens: int) -> int:
        """Returns the number of copies of a prompt of this many tokens that there is room for. A copy takes a state slot and, if
        the prompt does not fill its last block, a block."""
        slots = self.available_state_slots
        return min(slots, self.available) if tokens % self.block_tokens else slots

    def copy(self, blocks: Sequence[int], tokens: int) -> tuple[list[int], int]:
        """Takes blocks and a state slot for a copy of a prompt, and returns them. The copy shares the blocks that the prompt fills;
        the contents of a last block and of the state are not copied here. The caller has to check `most_copies` first."""
        whole, partial = divmod(tokens, self.block_tokens)
        shared, own = list(blocks[:whole]), self.take(1 if partial else 0)
        self.hold(shared)
        return shared + own, self.take_state_slot()

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks that this many tokens need."""
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks of unknown content, each with one holder, and returns their indices. If no other block is free,
        remembered prefixes are forgotten. The caller has to check `available` first."""
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
        """Adds a holder to each block."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int], state_slot: int | None = None) -> None:
        """Removes a holder from each block, and frees the state slot, if any. The last blocks of a prefix are released, and so
        reused, first: without its first block a prefix is not found."""
        if state_slot is not None:
            self._free_state_slots.append(state_slot)
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Returns the blocks of the longest remembered prefix of at most `most` tokens, and adds a holder to each."""
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
        """Makes the full blocks of a sequence findable by `find`. A prefix that is remembered already keeps its block. Does nothing
        without `shares_prefixes`."""
        if not self.shares_prefixes:
            return
        node = _ROOT
        for i in range(len(token_ids) // self.block_tokens):
            key = (node, tuple(token_ids[i * self.block_tokens : (i + 1) * self.block_tokens]))
            entry = self._nodes.get(key)
            if entry is None:
                if blocks[i] in self._keys:  # remembered under a forgotten parent
                    return
                self._last_node += 1
                entry = self._nodes[key] = (self._last_node, blocks[i])
                self._keys[blocks[i]] = key
            node = entry[0]

    def forget(self) -> None:
        """Forgets every prefix, since the weights have changed. Blocks keep their holders."""
        self._nodes.clear()
        self._keys.clear()
        self._free.extend(self._idle)
        self._idle.clear()
