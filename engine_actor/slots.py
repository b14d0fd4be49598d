"""Slots: who owns which, and the tokens whose keys and values it holds. No arrays here.

A slot that its owner leaves stays *warm*: free, but remembering. Keys and values at a position are a function
of the tokens up to it, so whoever asks for the same beginning may have them: in the slot, or as a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from engine_actor.prefixes import BLOCK, PrefixIndex, block_keys
from model.executor import Move

MAX_CANDIDATES = 8
"""Slots of equally many common blocks that are compared token by token."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that a request need not compute: the first `length` of those that slot `source` holds."""

    source: int
    length: int


@dataclass(slots=True)
class _Slot:
    owner: str | None
    namespace: Hashable
    tokens: list[int]
    keys: list[int]
    """Of its whole blocks; empty where nobody may reuse them."""


class Slots:
    """`count` slots of `max_len` tokens each. A slot has one owner or none.

    Every slot reserves `max_len` positions whether it fills them or not. That waste is the price of a layout
    in which a request is a single index; see docs/continuous-batching.md. What happens to the contents is
    noted in `moves`, in order, for the executor.
    """

    def __init__(self, count: int, max_len: int, *, reuse: bool = True) -> None:
        if count < 1 or max_len < 1:
            raise ValueError(f"slots and their length must be at least 1, got {count} and {max_len}")
        self.count = count
        self.max_len = max_len
        self.reuse = reuse
        self.tokens = 0
        """Held for owners."""
        self.warm_tokens = 0
        """Held by slots without one."""
        self.evicted = 0
        """Tokens forgotten so far because their slot or their budget was needed."""
        self.moves: list[Move] = []
        self._slots = [_Slot(None, None, [], []) for _ in range(count)]
        self._cold = list(range(count - 1, -1, -1))
        self._warm: dict[int, None] = {}
        """The least recently used first."""
        self._index = PrefixIndex()

    @property
    def free(self) -> int:
        """Slots without an owner."""
        return len(self._cold) + len(self._warm)

    @property
    def warm(self) -> list[int]:
        """Slots without an owner that remember something, the least recently used first."""
        return list(self._warm)

    def owner(self, slot: int) -> str | None:
        """The id of the request that owns the slot."""
        return self._slots[slot].owner

    def held(self, slot: int) -> Sequence[int]:
        """Token ids whose keys and values the slot holds, from position 0."""
        return self._slots[slot].tokens

    def find(self, namespace: Hashable, tokens: Sequence[int], keys: list[int], most: int) -> Prefix | None:
        """The longest beginning of `tokens`, `most` at most, that a slot of this namespace holds.

        `keys` are the block keys of `tokens` as far as they are known; missing ones are added. None when not
        even a block is held.
        """
        if not self.reuse or most < BLOCK or not self._index:
            return None
        block_keys(namespace, tokens, keys)
        blocks, candidates = self._index.longest(keys[: most // BLOCK])
        best: Prefix | None = None
        whole = blocks * BLOCK
        for source in candidates[:MAX_CANDIDATES]:
            slot = self._slots[source]
            if slot.namespace != namespace or slot.tokens[:whole] != tokens[:whole]:
                continue
            length, end = whole, min(most, len(slot.tokens))
            while length < end and slot.tokens[length] == tokens[length]:
                length += 1
            if best is None or length > best.length:
                best = Prefix(source, length)
        return best

    def known(self, key: int) -> bool:
        """Whether some slot holds the block of this key."""
        return key in self._index

    def allocate(self, owner: str, namespace: Hashable = None, prefix: Prefix | None = None) -> int:
        """Give `owner` a free slot, which holds the tokens of `prefix` or nothing.

        That is the prefix' own slot where nobody loses by it: free, and with hardly anything beyond the
        prefix. Else the one unused for longest, with a copy. Raises IndexError when none is free.
        """
        at = self._vacant(prefix)
        slot = self._slots[at]
        self._truncate(at, prefix.length if prefix and prefix.source == at else 0)
        if prefix and prefix.source != at:
            self._copy(at, prefix)
        slot.owner, slot.namespace = owner, namespace
        self.tokens += len(slot.tokens)
        return at

    def adopt(self, at: int, prefix: Prefix) -> None:
        """Hold the tokens of `prefix`, which another slot has computed meanwhile, rather than fewer."""
        self.tokens += prefix.length - len(self._slots[at].tokens)
        self._index.remove(at, self._slots[at].keys)
        self._copy(at, prefix)

    def extend(self, at: int, tokens: Sequence[int]) -> None:
        """The keys and values of these tokens follow those that the slot holds."""
        slot = self._slots[at]
        slot.tokens += tokens
        self.tokens += len(tokens)
        if self.reuse and len(slot.tokens) // BLOCK > len(slot.keys):
            before = len(slot.keys)
            self._index.add(at, block_keys(slot.namespace, slot.tokens, slot.keys)[before:])

    def clear(self, at: int) -> None:
        """Hold nothing that counts; the owner keeps the slot, and what is in it until it is released."""
        slot = self._slots[at]
        self._index.remove(at, slot.keys)
        self.tokens -= len(slot.tokens)
        slot.tokens, slot.keys = [], []

    def release(self, at: int, *, remember: bool = True) -> None:
        """Take the slot from its owner; the next request may have it in the same step.

        It stays warm unless it is not to `remember`. Raises ValueError if nobody owns it.
        """
        if not 0 <= at < self.count or self._slots[at].owner is None:
            raise ValueError(f"slot {at} is not held")
        slot = self._slots[at]
        slot.owner = None
        self.tokens -= len(slot.tokens)
        if remember and slot.keys:
            self._warm[at] = None
            self.warm_tokens += len(slot.tokens)
        else:
            self._truncate(at, 0)
            self._cold.append(at)

    def evict(self, most: int) -> None:
        """Forget warm slots, the least recently used first, until they hold `most` tokens together."""
        while self._warm and self.warm_tokens > most:
            at = self._cool(next(iter(self._warm)))
            self.evicted += len(self._slots[at].tokens)
            self._truncate(at, 0)
            self._cold.append(at)

    def check(self) -> None:
        """Raise AssertionError unless the books agree with each other."""
        owned = [at for at, slot in enumerate(self._slots) if slot.owner is not None]
        every = sorted([*owned, *self._cold, *self._warm])
        assert every == list(range(self.count)), "a slot is owned and free, or neither"
        names = [self._slots[at].owner for at in owned]
        assert len(set(names)) == len(names), "a request owns two slots"
        assert self.tokens == sum(len(self._slots[at].tokens) for at in owned), "tokens were miscounted"
        assert self.warm_tokens == sum(len(self._slots[at].tokens) for at in self._warm), "so were warm ones"
        assert all(len(slot.tokens) <= self.max_len for slot in self._slots), "a slot holds more than it can"
        assert not any(self._slots[at].tokens for at in self._cold), "a cold slot holds something"
        index = PrefixIndex()
        for at, slot in enumerate(self._slots):
            assert not self.reuse or slot.keys == block_keys(slot.namespace, slot.tokens, [])
            index.add(at, slot.keys)
        assert index == self._index, "the index does not know what the slots hold"

    def _vacant(self, prefix: Prefix | None) -> int:
        """Take a slot out of those that are free."""
        if prefix and prefix.source in self._warm:
            beyond = len(self._slots[prefix.source].tokens) - prefix.length
            if beyond < BLOCK:
                return self._cool(prefix.source)
        if self._cold:
            return self._cold.pop()
        if not self._warm:
            raise IndexError("no slot is free")
        at = self._cool(next(iter(self._warm)))
        kept = prefix.length if prefix and prefix.source == at else 0
        self.evicted += len(self._slots[at].tokens) - kept
        return at

    def _copy(self, at: int, prefix: Prefix) -> None:
        slot, source = self._slots[at], self._slots[prefix.source]
        slot.tokens = source.tokens[: prefix.length]
        slot.keys = source.keys[: prefix.length // BLOCK]
        self._index.add(at, slot.keys)
        self.moves.append(Move(at, prefix.length, prefix.source))
        if prefix.source in self._warm:
            self._warm[prefix.source] = self._warm.pop(prefix.source)

    def _cool(self, at: int) -> int:
        """Take a slot out of the warm ones."""
        del self._warm[at]
        self.warm_tokens -= len(self._slots[at].tokens)
        return at

    def _truncate(self, at: int, length: int) -> None:
        """Hold no more than the first `length` tokens."""
        slot = self._slots[at]
        if len(slot.tokens) > length:
            blocks = length // BLOCK
            self._index.remove(at, slot.keys[blocks:])
            del slot.keys[blocks:], slot.tokens[length:]
            self.moves.append(Move(at, length))
