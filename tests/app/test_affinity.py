"""A replica sends a conversation where its beginning was sent before, and forgets the oldest."""

from __future__ import annotations

from app.affinity import Affinity
from engine_actor.prefixes import BLOCK
from engine_actor.request import Request
from model.executor import SamplingParams


def request(prompt: list[int], tenant: str = "a", salt: str = "") -> Request:
    return Request("r", prompt, SamplingParams(), tenant=tenant, cache_salt=salt)


LONG = list(range(10 * BLOCK))


def test_the_next_turn_goes_where_the_last_one_went() -> None:
    affinity = Affinity()
    assert affinity.engine(request(LONG)) is None
    affinity.note(request(LONG[:100]), 2)
    affinity.note(request([7] * 200), 1)
    assert affinity.engine(request(LONG)) == 2
    assert affinity.engine(request([7] * 300)) == 1
    assert affinity.engine(request(LONG[: BLOCK - 1])) is None


def test_the_longest_beginning_decides() -> None:
    affinity = Affinity()
    affinity.note(request(LONG[: 4 * BLOCK]), 0)
    affinity.note(request([*LONG[: 8 * BLOCK], 1]), 1)
    affinity.note(request(LONG[: 4 * BLOCK]), 2)
    assert affinity.engine(request([*LONG[: 4 * BLOCK], *[5] * 64])) == 2
    assert affinity.engine(request(LONG)) == 1


def test_tenants_and_salts_have_beginnings_of_their_own() -> None:
    affinity = Affinity()
    affinity.note(request(LONG), 1)
    assert affinity.engine(request(LONG, tenant="b")) is None
    assert affinity.engine(request(LONG, salt="x")) is None


def test_what_is_remembered_is_bounded() -> None:
    affinity = Affinity(remembered=4)
    for start in range(9):
        affinity.note(request([start] * 4 * BLOCK), start)
    assert [affinity.engine(request([start] * 4 * BLOCK)) for start in (4, 5, 8)] == [None, 5, 8]
