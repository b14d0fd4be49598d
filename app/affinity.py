"""Which engine has computed a beginning before, as far as this replica has sent it there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine_actor.prefixes import BLOCK, block_keys
from engine_actor.request import Request

STRIDE = 4
"""Blocks between two beginnings that are remembered."""
REMEMBERED = 65_536
"""Beginnings, the least recently used forgotten first: some four million tokens."""


class Affinity:
    """Engines by the beginnings of the prompts they were given."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._engines: OrderedDict[int, int] = OrderedDict()
        self._remembered = remembered

    def engine(self, request: Request) -> int | None:
        """The index of the engine that was given the longest beginning of this prompt; None: nobody was."""
        for key in reversed(self._keys(request.prompt, request)):
            if (index := self._engines.get(key)) is not None:
                return index
        return None

    def note(self, request: Request, index: int) -> None:
        """The engine of this index is given the prompt."""
        for key in self._keys(request.prompt, request):
            self._engines[key] = index
            self._engines.move_to_end(key)
        while len(self._engines) > self._remembered:
            self._engines.popitem(last=False)

    def _keys(self, tokens: Sequence[int], request: Request) -> list[int]:
        # Keys hold in this process only: the engines have their own.
        keys = block_keys((request.tenant, request.cache_salt), tokens, [])
        return keys[STRIDE - 1 :: STRIDE] or keys[-1:] if len(tokens) >= BLOCK else []
