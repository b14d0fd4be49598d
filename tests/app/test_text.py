"""Text survives the way to tokens and back, piece by piece, whatever the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.text import Detokenizer, StopStrings, TemplateError, Tokenizer
from model.files import ModelFiles, find_model

TRICKY = "naïve café — 日本語 🎉👩‍👩‍👧 \u200d \n\n\t  x" * 3


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A Llama-2-like tokenizer: ▁ for spaces, bytes for what the vocabulary lacks."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "a",
        "é",
    ]
    raw = RawTokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    return Tokenizer(fast, frozenset({2}))


# Beyond it lie bytes that this vocabulary has no token for.
ENCODABLE = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])


@given(text=st.text(ENCODABLE, max_size=60))
@settings(max_examples=60, deadline=None)
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


@given(tokens=st.lists(st.integers(0, 49151), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_tokens_decode_as_the_tokenizer_itself_decodes_them(
    tokenizer: Tokenizer, tokens: list[int]
) -> None:
    raw = tokenizer._tokenizer.backend_tokenizer
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == raw.decode(tokens, skip_special_tokens=False)
    hidden = tokenizer.decode(tokens, skip_special_tokens=True)
    assert hidden == raw.decode(tokens, skip_special_tokens=True)


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


def test_sentencepiece_text_loses_its_first_space_only(sentencepiece: Tokenizer) -> None:
    hello, world, e_acute = 260, 261, 263
    euro = [3 + byte for byte in "€".encode()]
    tokens = [hello, world, *euro, e_acute]
    assert pieces(sentencepiece, tokens) == ["Hello", " world", "", "", "€", "é", ""]
    assert "".join(pieces(sentencepiece, tokens)) == sentencepiece._tokenizer.backend_tokenizer.decode(tokens)


def test_what_continues_a_prompt_keeps_its_first_space(sentencepiece: Tokenizer) -> None:
    hello, world = 260, 261
    continuing = Detokenizer(sentencepiece, at_start=False)
    assert sentencepiece.decode([hello]) + continuing.push(world) == "Hello world"


def test_special_tokens_are_hidden_from_text(tokenizer: Tokenizer) -> None:
    eos = next(iter(tokenizer.eos_token_ids))
    tokens = [*tokenizer.encode("one"), eos, *tokenizer.encode(" two")]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "one two"
    assert tokenizer.decode(tokens) == "one<|im_end|> two"


def test_a_token_is_shown_with_its_bytes(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("🎉")[0]
    assert tokenizer.token_text(half) == "\\x" + tokenizer.token_bytes(half).hex("-").replace("-", "\\x")
    assert tokenizer.token_text(tokenizer.encode(" world")[0]) == " world"
    assert tokenizer.token_bytes(10**9) == b""


def test_a_decoder_that_cannot_be_followed_is_refused(sentencepiece: Tokenizer) -> None:
    raw = RawTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    raw.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), frozenset())


def test_the_template_writes_the_conversation(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert tokenizer.decode(tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_the_template_refuses_is_said(sentencepiece: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        sentencepiece.encode_chat([{"role": "user", "content": "Hi"}])
    fast = sentencepiece._tokenizer
    fast.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateError, match="roles must alternate"):
        Tokenizer(fast, frozenset()).encode_chat([{"role": "user", "content": "Hi"}])


def test_a_gguf_tokenizer_is_converted_once(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer._tokenizer.save_pretrained(tmp_path / "source")
    files = find_model()
    loads = []

    def load(folder: Path, **options: object) -> object:
        loads.append(options.get("gguf_file"))
        return tokenizer._tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    for _ in range(2):
        Tokenizer.load(files, tmp_path)
    assert loads == [files.gguf_file, None, None]
    assert [entry.name for entry in (tmp_path / "tokenizers").iterdir()] != []


def test_end_tokens_come_from_the_tokenizer_and_the_generation_config(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    loaded = Tokenizer.load(ModelFiles(tmp_path, None, "x"), tmp_path)
    assert loaded.eos_token_ids == {0, 7} | tokenizer.eos_token_ids


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
