"""Which slots hold which beginnings, so that the longest common prefix is found without comparing tokens.

Tokens are cut into blocks, and a block's key is a hash of its tokens and of the key of the block before it:
equal keys mean equal beginnings (vLLM's automatic prefix caching looks its blocks up the same way). Each
namespace has keys of its own. Hashes may collide, so whoever finds a slot here compares the tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

BLOCK = 16
"""Tokens of a block: a shorter common prefix is not looked for."""


def block_keys(namespace: Hashable, tokens: Sequence[int], known: list[int]) -> list[int]:
    """Append to `known` the keys of the whole blocks of `tokens` that it lacks, and return it."""
    key = known[-1] if known else hash(namespace)
    for start in range(len(known) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[start : start + BLOCK]))
        known.append(key)
    return known


class PrefixIndex:
    """Slots by the keys of the blocks that they hold."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixIndex) and self._slots == other._slots

    __hash__ = None  # type: ignore[assignment]

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """The slot holds these blocks, too."""
        for key in keys:
            self._slots.setdefault(key, {})[slot] = None

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """The slot holds these blocks no longer."""
        for key in keys:
            holders = self._slots[key]
            del holders[slot]
            if not holders:
                del self._slots[key]

    def longest(self, keys: Sequence[int]) -> tuple[int, Sequence[int]]:
        """How many leading blocks of `keys` some slot holds, and the slots that hold so many.

        Whoever holds a block holds all before it, so the number is found by bisection.
        """
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._slots:
                low = middle
            else:
                high = middle - 1
        return low, tuple(self._slots[keys[low - 1]]) if low else ()
