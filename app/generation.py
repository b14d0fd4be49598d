"""The outputs of one HTTP request's sequences, as they arrive from wherever they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from app.flight import Flight
from engine_actor.request import FinishReason, Output, Request

Drop = Callable[[Sequence[Flight], FinishReason], None]
"""Ends flights wherever they are, and says why."""


class Generation:
    """The outputs of some requests, merged as they arrive: `async for sequence, output in ...`.

    Ends when every request has ended. `close` drops what has not, at any time.
    """

    def __init__(self, drop: Drop, requests: Sequence[Request]) -> None:
        self._drop = drop
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self.flights = [Flight(request, i, self._outputs) for i, request in enumerate(requests)]
        self._ended: set[int] = set()

    @property
    def fingerprint(self) -> str:
        """What the outputs so far depend on; several engines that compute differently are all named."""
        return "+".join(sorted({name for flight in self.flights for name in flight.fingerprints}))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while len(self._ended) < len(self.flights):
            sequence, output = await self._outputs.get()
            if sequence not in self._ended:
                if output.finish_reason is not None:
                    self._ended.add(sequence)
                yield sequence, output

    def end(self, sequence: int) -> None:
        """The caller has found the end of this sequence: its slot is free, and it counts as finished."""
        self._ended.add(sequence)
        self._drop([self.flights[sequence]], "stop")

    def close(self) -> None:
        """Drop every sequence that has not ended."""
        self._ended.update(flight.sequence for flight in self.flights)
        self._drop(self.flights, "abort")
