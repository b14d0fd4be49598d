"""Slots: who owns which, and the tokens whose keys and values it holds. No arrays here."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def _nothing(slot: int) -> None:
    pass


class Slots:
    """`count` slots of `max_len` tokens each. A slot has one owner or none.

    Every slot reserves `max_len` positions whether it fills them or not. That waste is the price of a layout
    in which a request is a single index; see docs/continuous-batching.md. `forget` is told of each slot whose
    contents nobody will read again.
    """

    def __init__(self, count: int, max_len: int, forget: Callable[[int], None] = _nothing) -> None:
        if count < 1 or max_len < 1:
            raise ValueError(f"slots and their length must be at least 1, got {count} and {max_len}")
        self.count = count
        self.max_len = max_len
        self.tokens = 0
        """Held over all slots."""
        self._forget = forget
        self._owners: list[str | None] = [None] * count
        self._held: list[list[int]] = [[] for _ in range(count)]
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def owner(self, slot: int) -> str | None:
        """The id of the request that owns the slot."""
        return self._owners[slot]

    def held(self, slot: int) -> Sequence[int]:
        """Token ids whose keys and values the slot holds, from position 0."""
        return self._held[slot]

    def allocate(self, owner: str) -> int:
        """Give `owner` a free slot, which holds nothing. Raises IndexError when none is free."""
        slot = self._free.pop()
        self._owners[slot] = owner
        return slot

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """The keys and values of these tokens follow those that the slot holds."""
        self._held[slot] += tokens
        self.tokens += len(tokens)

    def clear(self, slot: int) -> None:
        """Hold nothing; the owner keeps the slot, and what is in it stays until it is released."""
        self.tokens -= len(self._held[slot])
        self._held[slot] = []

    def release(self, slot: int) -> None:
        """Clear the slot and take it from its owner; the next request may have it in the same step.

        Raises ValueError if nobody owns it.
        """
        if not 0 <= slot < self.count or self._owners[slot] is None:
            raise ValueError(f"slot {slot} is not held")
        self.clear(slot)
        self._forget(slot)
        self._owners[slot] = None
        self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError unless the books agree with each other."""
        owned = [slot for slot, owner in enumerate(self._owners) if owner is not None]
        assert sorted(owned + self._free) == list(range(self.count)), "a slot is owned and free, or neither"
        names = [self._owners[slot] for slot in owned]
        assert len(set(names)) == len(names), "a request owns two slots"
        assert self.tokens == sum(map(len, self._held)), "tokens were miscounted"
        assert all(len(held) <= self.max_len for held in self._held), "a slot holds more than it can"
        assert not any(self._held[slot] for slot in self._free), "a free slot holds something"
