"""Tokens become text piece by piece, whatever the tokenizer, and stop strings end it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from app.text import Detokenizer, StopStrings
from app.tokenizer import Tokenizer

TRICKY = "naïve café — 日本語 🎉👩‍👩‍👧 \u200d \n\n\t  x" * 3


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def llama_2() -> Backend:
    """Like Llama 2's: ▁ for spaces, bytes for what the vocabulary lacks."""
    bytes_ = (f"<0x{byte:02X}>" for byte in range(256))
    words = ["<unk>", "<s>", "</s>", *bytes_, "▁", "▁Hello", "▁world", "a", "é"]
    backend = Backend(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer(llama_2(), {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"})


# Beyond it lie bytes that this vocabulary has no token for.
ENCODABLE = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])


@given(text=st.text(ENCODABLE, max_size=60))
@settings(max_examples=60, deadline=None)
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


@given(tokens=st.lists(st.integers(0, 49151), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_tokens_decode_as_the_tokenizer_itself_decodes_them(
    tokenizer: Tokenizer, backend: Backend, tokens: list[int]
) -> None:
    assert "".join(pieces(tokenizer, tokens)) == backend.decode(tokens, skip_special_tokens=False)
    hidden = tokenizer.decode(tokens, skip_special_tokens=True)
    assert hidden == backend.decode(tokens, skip_special_tokens=True)


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TRICKY)
    shown = pieces(tokenizer, tokens)
    assert len(tokens) > len(TRICKY) / 2  # several tokens a character: there is something to split
    assert "�" not in "".join(shown)
    assert "".join(shown) == TRICKY


def test_a_character_left_unfinished_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🎉")[:-1]
    assert "".join(pieces(tokenizer, tokens)[:-1]) == ""
    assert pieces(tokenizer, tokens)[-1] == "�"


def test_bytes_that_never_become_a_character_are_not_held_back(
    tokenizer: Tokenizer, backend: Backend
) -> None:
    half = tokenizer.encode("🎉")[0]
    assert pieces(tokenizer, [half] * 9)[:-1] == ["", *["�"] * 8]
    stream = decoders.DecodeStream(skip_special_tokens=False)
    assert [stream.step(backend, half) for _ in range(9)] == [None] * 9


def test_sentencepiece_text_loses_its_first_space_only(sentencepiece: Tokenizer) -> None:
    hello, world, e_acute = 260, 261, 263
    euro = [3 + byte for byte in "€".encode()]
    tokens = [hello, world, *euro, e_acute]
    assert pieces(sentencepiece, tokens) == ["Hello", " world", "", "", "€", "é", ""]
    assert "".join(pieces(sentencepiece, tokens)) == llama_2().decode(tokens)


def test_what_continues_a_prompt_keeps_its_first_space(sentencepiece: Tokenizer) -> None:
    hello, world = 260, 261
    continuing = Detokenizer(sentencepiece, at_start=False)
    assert sentencepiece.decode([hello]) + continuing.push(world) == "Hello world"


def test_special_tokens_are_hidden_from_text(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("one"), 2, *tokenizer.encode(" two")]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "one two"
    assert tokenizer.decode(tokens) == "one<|im_end|> two"


@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_never_leak_and_nothing_is_swallowed(parts: list[str], stops: list[str]) -> None:
    checker = StopStrings(stops)
    text = "".join(parts)
    shown = ""
    for part in parts:
        shown += checker.push(part)
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if checker.found:
            break
    else:
        shown += checker.flush()
        assert shown == text
        return
    assert any(text[len(shown) :].startswith(stop) for stop in stops)


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    checker = StopStrings(["END", "STOP"])
    assert [checker.push(text) for text in ("a", " S", "T", "x", " E", "N")] == ["a", " ", "", "STx", " ", ""]
    assert checker.push("D tail") == ""
    assert checker.found


def test_before_min_tokens_stop_strings_pass() -> None:
    checker = StopStrings(["x"])
    assert checker.push("axb", search=False) == "axb"
    assert checker.push("cx") == "c"
    assert checker.found
