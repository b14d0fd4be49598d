"""The experiment on prefix reuse, small: what it says, and that the sides do the same work."""

from __future__ import annotations

import json
from pathlib import Path

from bench import __main__ as bench
from bench.prefix import ANSWER, chats
from tests.model.test_transformer import save_random_model


def test_chats_grow_to_their_history_and_share_their_stem() -> None:
    work = chats(4, 3, 600, 1000, gap=1.0, think=1.0, seed=1, stem=100)
    assert [chat.starts for chat in work] == sorted(chat.starts for chat in work)
    assert len({tuple(chat.said[0][:100]) for chat in work}) == 1
    assert len({tuple(chat.said[0]) for chat in work}) == 4
    for chat in work:
        total = sum(map(len, chat.said)) + len(chat.said) * ANSWER
        assert 0.7 * 500 + 100 <= total <= 1.3 * 500 + 100


def test_prefix_reports_both_sides_and_no_difference(tmp_path: Path) -> None:
    save_random_model(tmp_path / "model", "llama")
    sizes = "--chats 3 --turns 3 --history 300 --gap 0.05 --think 0.02 --requests 6 --prompt 200"
    sizes += " --slots 4 --max-len 512"
    code = bench.main(["prefix", "--out", str(tmp_path), "--model", str(tmp_path / "model"), *sizes.split()])
    assert code in (0, 1)
    figures = json.loads((tmp_path / "prefix.json").read_text())
    assert figures["different"] == 0
    assert 0.3 < figures["hit_rate"] <= figures["hit_rate_of_an_infinite_cache"] < 1
    assert figures["shared"]["tenant"]["rows"] < figures["shared"]["off"]["rows"] / 2
    assert figures["chat"]["off"]["reused"] == 0
    assert {"ttft_p50", "tokens_per_s"} <= figures["chat"]["tenant"].keys()
    assert (tmp_path / "prefix.png").stat().st_size > 5_000
