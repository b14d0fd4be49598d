"""A GGUF file's tokens are those that its model was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from app.gguf_tokenizer import ConversionError, convert
from app.tokenizer import Tokenizer
from tests.app import gguf_files
from tests.app.gguf_files import byte_level, sentencepiece

GPT2 = "I'll  pay 1234,5 now\n\n  x=1;"


def pieces(file: Path, text: str) -> list[str]:
    """What is merged on its own: `text` as the pre-tokenizer cuts it."""
    backend = convert(file)[0]
    assert backend.pre_tokenizer is not None
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a\n\n1", [81, 1116, 33]),
        ("x =    1", [104, 446, 289, 33]),
        ("1. one\n\n2. two", [33, 30, 582, 1116, 34, 30, 827]),
    ],
)
def test_the_packaged_file_is_read_as_others_read_it(
    tokenizer: Tokenizer, text: str, tokens: list[int]
) -> None:
    assert tokenizer.encode(text) == tokens


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll 1234\n\n  x", ["I", "'ll", "Ġ1234", "ĊĊĠ", "Ġx"]),
        ("smollm", "I'll 1234\n\n  x", ["I", "'ll", "Ġ", "1", "2", "3", "4", "ĊĊĠ", "Ġx"]),
        ("llama-bpe", "I'LL 1234\n\n  x", ["I", "'LL", "Ġ", "123", "4", "ĊĊ", "Ġ", "Ġx"]),
        ("qwen2", "I'LL 12\n\n  x", ["I", "'LL", "Ġ", "1", "2", "ĊĊ", "Ġ", "Ġx"]),
        ("qwen2", "e\u0301", ["Ã©"]),
        ("llama-bpe", "e\u0301", ["e", "Ìģ"]),
        ("qwen35", "ae\u0323\u0301 1", ["aáº¹Ìģ", "Ġ", "1"]),
        ("tekken", "HTTPServer's 12", ["HTTPServer", "'s", "Ġ", "1", "2"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", "Ġ", "123", "4"]),
        ("deepseek-v3", "a1234 +b=一二 c", ["a", "123", "4", "Ġ+", "b", "=", "ä¸ĢäºĮ", "Ġc"]),
        ("falcon", "a+1234", ["a", "+", "123", "4"]),
        ("default", "a+12345", ["a", "+", "123", "45"]),
        (None, "a+12345", ["a", "+", "123", "45"]),
    ],
)
def test_each_family_cuts_text_its_own_way(
    tmp_path: Path, pre: str | None, text: str, expected: list[str]
) -> None:
    assert pieces(byte_level(tmp_path / "x.gguf", pre), text) == expected


def test_merges_are_followed_in_order(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "x.gguf", "gpt-2", ["bc", "ab", "abc"], ["b c", "a b", "a bc"])
    assert convert(file)[0].encode("abc ab").tokens == ["abc", "Ġ", "ab"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("gpt-2", ["a", "b", "c"])])
def test_a_word_that_no_merge_makes_is_a_token_in_some_families(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    file = byte_level(tmp_path / "x.gguf", pre, ["abc"])
    assert convert(file)[0].encode("abc").tokens == expected


def test_an_unknown_pre_tokenizer_is_named_with_the_way_out(tmp_path: Path, backend: Backend) -> None:
    file = byte_level(tmp_path / "x.gguf", "of-tomorrow", control=["<|eot_id|>"], fields={"eos_token_id": 5})
    with pytest.raises(ConversionError, match=r"'of-tomorrow'.*tokenizer\.json beside x\.gguf"):
        convert(file)
    backend.save(str(tmp_path / "tokenizer.json"))
    built, config = convert(file, backend=tmp_path / "tokenizer.json")
    assert built.encode("a\n\n1").ids == [81, 1116, 33]
    assert config["eos_token_id"] == [5, 256], "what ends a generation still comes from the GGUF file"


def test_a_tokenizer_of_another_kind_is_named(tmp_path: Path) -> None:
    writer = gguf_files.begun(tmp_path / "x.gguf", "rwkv", ["a"], [1])
    with pytest.raises(ConversionError, match="'rwkv'"):
        convert(gguf_files.finished(writer, tmp_path / "x.gguf", {}))


SCORES = {"bc": -2.0, "ab": -3.0, "▁a": -4.0, "abc": -5.0, "▁abc": -6.0}
PIECES = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0} | SCORES


def test_sentencepiece_merges_the_best_score_first(tmp_path: Path) -> None:
    backend = convert(sentencepiece(tmp_path / "x.gguf", PIECES))[0]
    assert backend.encode("abc").tokens == ["▁abc"]
    assert backend.encode("bcab").tokens == ["▁", "bc", "ab"]
    assert backend.encode("a€").tokens == ["▁a", "<0xE2>", "<0x82>", "<0xAC>"]
    assert backend.decode(backend.encode("bc a€").ids) == "bc a€"


def test_the_space_in_front_is_left_out_where_the_file_says_so(tmp_path: Path) -> None:
    backend = convert(sentencepiece(tmp_path / "x.gguf", PIECES, {"add_space_prefix": False}))[0]
    assert backend.encode("abc a").tokens == ["abc", "▁a"]
    assert backend.decode(backend.encode(" a").ids) == " a"


def test_what_begins_and_ends_a_text_comes_from_the_file(tmp_path: Path) -> None:
    def around(**fields: bool | int) -> tuple[bool, bool]:
        config = convert(byte_level(tmp_path / "x.gguf", "qwen2", fields=fields))[1]
        return config["add_bos_token"], config["add_eos_token"]

    assert around() == (False, False)
    assert around(bos_token_id=1, eos_token_id=2, add_bos_token=True, add_eos_token=True) == (True, True)
    with pytest.raises(ConversionError, match="add_bos_token, but no bos token"):
        around(add_bos_token=True)
    config = convert(sentencepiece(tmp_path / "y.gguf", PIECES))[1]
    assert (config["add_bos_token"], config["bos_token"], config["eos_token"]) == (True, "<s>", "</s>")


def test_everything_that_ends_a_turn_ends_a_generation(tmp_path: Path) -> None:
    control = ["<|endoftext|>", "<|im_end|>", "<|x|>", "<mine>", "<theirs>"]
    named = {"eos_token_id": 258, "eot_token_id": 260, "eom_token_id": 261}
    file = byte_level(tmp_path / "x.gguf", "qwen2", ["</s>"], (), control, named)
    assert convert(file)[1]["eos_token_id"] == [257, 258, 260, 261], "and `</s>` is an ordinary word here"


def test_the_packaged_file_ends_with_its_turn_and_with_its_text(tokenizer: Tokenizer) -> None:
    ends = {tokenizer.token_text(token) for token in tokenizer.eos_token_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}


def test_a_token_that_stands_there_twice_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="'ab' twice"):
        convert(byte_level(tmp_path / "x.gguf", "gpt-2", ["ab", "ab"]))


def test_merges_that_make_no_token_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="merges"):
        convert(byte_level(tmp_path / "x.gguf", "gpt-2", [], ["a b"]))
