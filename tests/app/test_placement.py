"""Free KV decides, then the queue, then the order; alike and roomy engines come first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from app.placement import best


@dataclass
class Known:
    name: str
    free_kv: int = 100
    waiting: int = 0
    held: int = 0
    slots: int = 4
    fingerprint: str | None = "here"


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([Known("b", free_kv=101)], "b"),
        ([Known("b", free_kv=99)], "a"),
        ([Known("b")], "a"),
        ([Known("b", free_kv=101, fingerprint="there")], "a"),
        ([Known("b", free_kv=101, held=6)], "a"),
        ([Known("b", free_kv=101, held=5)], "b"),
        ([Known("b", free_kv=100, waiting=1), Known("c", free_kv=101, waiting=9)], "c"),
    ],
)
def test_one_beside_others(others: list[Known], chosen: str) -> None:
    assert best([Known("a"), *others], "here", max_waiting=2).name == chosen


def test_a_shorter_queue_decides_between_equals() -> None:
    assert best([Known("a", waiting=2), Known("b", waiting=1)], None, max_waiting=9).name == "b"


def test_where_none_is_alike_or_roomy_the_others_serve() -> None:
    full = [Known("a", held=6, fingerprint="there"), Known("b", held=7, free_kv=101, fingerprint="there")]
    assert best(full, "here", max_waiting=2).name == "b"


def test_who_remembers_is_chosen_up_to_a_quarter_more_than_its_share() -> None:
    def chosen(running: int) -> str:
        remembering = Known("remembers", held=running, free_kv=0)
        others = [Known("idle", held=4, free_kv=900), Known("idler", held=4, free_kv=1000)]
        return best([*others, remembering], None, max_waiting=99, remembering=remembering).name

    assert chosen(4) == chosen(6) == "remembers"
    assert chosen(7) == "idler"


def test_who_remembers_and_has_no_room_is_passed_over() -> None:
    full = Known("remembers", held=3, slots=1)
    assert best([full, Known("other", held=0)], None, max_waiting=2, remembering=full).name == "other"
