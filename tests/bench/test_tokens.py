"""`bench tokens` draws the strings that go wrong, and tells whose tokens differ."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.tokenizer import Tokenizer
from bench import tokens
from bench.__main__ import main
from bench.engines.peer import Peer
from model.files import ModelFiles

OTHER = """
import json, sys
words = json.loads(sys.argv[1])
print(json.dumps({"tokens": words, "merges": []}), flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    print(json.dumps([[words.index(c) for c in text if c in words] + [0] * ("#" in text) for text in texts]))
"""
"""One token a character; where there is a # in the text, one too many."""


def other(letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def encoder(peer: Peer, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", OTHER, json.dumps([*letters])]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            yield process

    monkeypatch.setattr(tokens, "_encoder", encoder)


def test_a_string_that_others_read_differently_is_counted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other("ab#", monkeypatch)
    strings = ["ab", "a#b", "ba", "a!"]
    row = tokens._compare(Peer("other", "gguf"), "gpt-2", ModelFiles(tmp_path, "", ""), strings, tmp_path)
    assert (row["strings"], row["different"]) == (3, 1)
    assert row["examples"] == [{"string": "a#b", "ours": [0, 2, 1], "theirs": [0, 2, 1, 0]}]
    assert (row["unspelled"], row["unspelled_different"]) == (1, 0), "! is no token of this vocabulary"


def test_the_strings_are_of_every_kind_and_always_the_same() -> None:
    drawn = list(tokens.draw(2400, seed=1))
    assert drawn == list(tokens.draw(2400, seed=1))
    assert len(set(drawn)) > 2000
    everything = "".join(drawn)
    for sought in ("\u2028", "\u200d", "\x85", "\x1f", "\u0301", "字", "\t\t", " " * 60, "0x", "def "):
        assert sought in everything
    assert all("\x00" not in text and text.encode() for text in drawn)


def test_a_vocabulary_becomes_the_same_tokenizer_again(tmp_path: Path) -> None:
    tokens.write_gguf(tmp_path / "x.gguf", "gpt-2", {"tokens": ["a", "b", "ab"], "merges": ["a b"]})
    assert Tokenizer.load(ModelFiles(tmp_path, "x.gguf", "x"), tmp_path).encode("abba") == [2, 1, 0]


def test_without_anything_to_compare_with_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.engines.peer.HOME", tmp_path)
    assert main(["tokens", "--out", str(tmp_path / "out")]) == 2
    assert "--install" in capsys.readouterr().err
