"""Our tokenizers beside others' readings of the same vocabularies: how many strings differ."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf

from app.tokenizer import Tokenizer
from bench.engines.peer import PEERS, Peer
from bench.origin import REPO
from bench.report import BenchError, Report
from model.files import ModelFiles, find_model

PUBLISHED = Peer("published-tokenizers", "gguf")
"""Vocabularies of other families in packages, and the libraries they are published for."""
FAMILIES = dict.fromkeys(("llama-bpe", "llama4", "qwen2", "tekken"), "tiktoken") | {"llama": "sentencepiece"}
"""`tokenizer.ggml.pre` or `.model` of a vocabulary, and the library that reads it."""
DEFAULT_STRINGS = 2400
COLUMNS = ("vocabulary", "beside", "tokens", "strings", "different", "unspelled", "unspelled_different")
SHOWN = 8
"""Differing strings in the JSON, for each tokenizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the packaged model)")
    parser.add_argument("--strings", type=int, default=DEFAULT_STRINGS, help=f"(default: {DEFAULT_STRINGS})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--install", action="store_true", help="create the environments of the others first")


def run(args: argparse.Namespace) -> int:
    report = Report("tokens", args.out)
    model = find_model(args.model)
    if model.gguf_file is None:
        raise BenchError(f"{model.name} is no GGUF file: its tokenizer.json is used as it is")
    sides = [(PEERS["openvino-genai"], "openvino"), *((PUBLISHED, family) for family in FAMILIES)]
    if args.install:
        for peer, _ in sides:
            peer.install()
    strings = list(draw(args.strings, args.seed))
    rows: list[dict[str, Any]] = []
    with report.progress("tokenizers", len(sides)) as advance, tempfile.TemporaryDirectory() as scratch:
        for peer, name in sides:
            if peer.python.exists():
                rows.append(_compare(peer, name, model, strings, Path(scratch)))
                report.save(_figures(rows))
            else:
                report.say(f"{peer.name}: not installed, {name} skipped; python -m bench tokens --install")
            advance()
    if not rows:
        raise BenchError("nothing to compare with: python -m bench tokens --install")
    report.records(
        "Strings whose tokens differ; apart from them, those with a byte that is no token",
        [{key.replace("_", " "): row[key] for key in COLUMNS} for row in rows],
    )
    for row in rows:
        for example in row["examples"][:2]:
            report.say(f"{row['vocabulary']}: {example['string']!r}: {example['ours']} {example['theirs']}")
    if any(row["unspelled"] for row in rows):
        report.note(
            "A byte-level vocabulary may lack tokens for bytes that its training never saw. We leave such a "
            "byte out, as tokenizers and llama.cpp do; OpenVINO writes the unknown token, which may be the "
            "one that ends a text. Neither can be checked by the other there: those strings count apart."
        )
    figures = _figures(rows)
    report.at_least("strings, beside whom they are fewest", min(row["strings"] for row in rows), 2000)
    report.at_most("different", figures["different"], 0)
    return report.finish(figures)


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: sum(row[key] for row in rows) for key in COLUMNS[3:]} | {"tokenizers": rows}


def _compare(
    peer: Peer, name: str, model: ModelFiles, strings: Sequence[str], scratch: Path
) -> dict[str, Any]:
    arguments = [str(model.dir / (model.gguf_file or ""))] if name == "openvino" else []
    with _encoder(peer, [name, *arguments]) as side:
        vocabulary = _answer(side)
        if vocabulary:
            file = scratch / f"{name}.gguf"
            write_gguf(file, name, vocabulary)
            model = ModelFiles(scratch, file.name, name)
        ours = Tokenizer.load(model, scratch)
        assert side.stdin is not None
        print(json.dumps(strings), file=side.stdin, flush=True)
        theirs = _answer(side)
    mine = [ours.encode(text, add_special_tokens=False) for text in strings]
    different = {i for i in range(len(strings)) if mine[i] != theirs[i]}
    known = {ours.token_bytes(token) for token in range(len(ours))}
    missing = {byte for byte in range(256) if bytes([byte]) not in known}
    unspelled = {i for i, text in enumerate(strings) if missing & set(text.encode())}
    shown = [
        {"string": strings[i], "ours": mine[i], "theirs": theirs[i]} for i in sorted(different - unspelled)
    ]
    return {
        "vocabulary": model.name,
        "beside": FAMILIES.get(name, name),
        "tokens": sum(map(len, mine)),
        "strings": len(strings) - len(unspelled),
        "different": len(different - unspelled),
        "unspelled": len(unspelled),
        "unspelled_different": len(different & unspelled),
        "examples": shown[:SHOWN],
    }


def write_gguf(file: Path, name: str, vocabulary: Mapping[str, Any]) -> None:
    """A GGUF file that holds a vocabulary alone: `tokens`, with `merges`, or with `scores` and `types`."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama" if "scores" in vocabulary else "gpt2")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_add_bos_token(False)
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
        writer.add_token_types(vocabulary["types"])
    else:
        writer.add_tokenizer_pre(name)
        writer.add_token_merges(vocabulary["merges"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@contextmanager
def _encoder(peer: Peer, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [str(peer.python), "-m", "bench.engines.encoders", *arguments],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def _answer(side: subprocess.Popen[str]) -> Any:  # noqa: ANN401
    assert side.stdout is not None
    assert side.stderr is not None
    line = side.stdout.readline()
    if not line:
        last = (side.stderr.read().strip().splitlines() or ["no output"])[-1]
        raise BenchError(f"{' '.join(map(str, side.args[-2:]))} ended: {last}")  # type: ignore[index]
    return json.loads(line)


WORDS = [
    *("the", "a", "of", "batching", "token", "naïve", "façade", "don't", "I'll", "we've", "they'd", "it's"),
    *("O'Neil", "co-op", "e.g.", "U.S.A.", "hello", "World", "HTTP2Server", "snake_case", "camelCase"),
    *("größer", "Ελλάδα", "Москва", "שלום", "مرحبا", "हिन्दी", "ไทย", "tiếng", "Việt", "zażółć"),
]
CODE = (
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] += b[i] * 0x1F;\n}\n",
    "SELECT *\nFROM t\nWHERE a >= 10 AND b != 'x''y';\n",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9\\n"}',
    '<div class="a">&nbsp;</div>\r\n<!-- no -->',
    "#!/bin/sh\nset -eu\necho \"${A:-b}\" | sed 's/x/y/g' >&2\n",
    "$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$",
    "    if a:\n\n\n        pass\n\telse:\n  \t  x = 1\n",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org ../../x ~/.ssh",
)
CJK = (
    "今日は天気がいいですね。漢字とカナ、ひらがな。中文字符，标点：！？「引号」"
    "한국어 텍스트입니다。０１２ＡＢＣ"
)
EMOJI = [
    *(
        "👩\u200d👩\u200d👧\u200d👦",
        "👩🏽\u200d💻",
        "🏳️\u200d🌈",
        "🇩🇪🇫🇷",
        "1️⃣",
        "❤️",
        "☺",
        "👍🏻👍🏿",
        "✂️",
        "©",
        "™",
    ),
    *("🤷🏿\u200d♂️", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "🧑\u200d🚀"),
]
LINES = ("\n", "\r\n", "\r", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\n\n", "\n \n", "\u2028\n")
SPACES = (" ", "\t", "\u00a0", "\u3000", "\u2003", "\u200b", "\ufeff", "\u202f", "\u1680")
CONTROLS = [chr(code) for code in (*range(1, 32), 127, *range(128, 160), 0xAD, 0x200E, 0x202E, 0x2060)]


def draw(count: int, seed: int) -> Iterator[str]:
    """`count` strings of the kinds that tokenizers get wrong, the same for the same seed."""
    chance = random.Random(seed)
    kinds = (
        _numbers, _code, _indents, _cjk, _emoji, _combining, _lines, _controls, _spaces, _words, _any, _mixed
    )  # fmt: skip
    for index in range(count):
        yield kinds[index % len(kinds)](chance)


def _numbers(chance: random.Random) -> str:
    number = chance.choice(
        (
            str(chance.randrange(10 ** chance.randint(1, 20))),
            f"{chance.random() * 10 ** chance.randint(-8, 8):.{chance.randint(0, 9)}f}",
            f"{chance.randrange(10**9):,}",
            f"-{chance.random():e}",
            f"{chance.randint(1, 31)}.{chance.randint(1, 12)}.{chance.randint(1900, 2100)}",
            f"{chance.randrange(2**32):#x}",
            "".join(chance.choices("٠١٢٣٤०१२३४Ⅳⅻ²³½¾①②㊿〇一二", k=chance.randint(1, 6))),
        )
    )
    around = chance.choice(
        ("{}", "x = {}", "{}. one\n\n{}. two", "a\n\n{}", "x =    {}", "v{}b", "${} %", "({})")
    )
    return around.replace("{}", number)


def _code(chance: random.Random) -> str:
    return "".join(chance.choices(CODE, k=chance.randint(1, 3)))


def _indents(chance: random.Random) -> str:
    return "".join(
        chance.choice(("\n", "\n\n", "\r\n"))
        + chance.choice((" ", "\t")) * chance.randint(0, 33)
        + chance.choice((*WORDS, "1", "}", "-", "#"))
        for _ in range(chance.randint(1, 8))
    )


def _cjk(chance: random.Random) -> str:
    start = chance.randrange(len(CJK))
    extra = "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(chance.randint(0, 5)))
    return CJK[start : start + chance.randint(1, 20)] + extra + chance.choice(("", " abc", "123", "\n"))


def _emoji(chance: random.Random) -> str:
    return "".join(chance.choice(EMOJI) + chance.choice(("", " ", "a")) for _ in range(chance.randint(1, 5)))


def _combining(chance: random.Random) -> str:
    def one() -> str:
        marks = chance.choices(("\u0301", "\u0308", "\u0327", "\u0323", "\u20d7", "\u093f", "\u05b8"), k=2)
        return chance.choice("aeioucnAZ1ह -") + "".join(marks[: chance.randint(0, 2)])

    text = "".join(one() for _ in range(chance.randint(1, 12)))
    return unicodedata.normalize("NFD", chance.choice(WORDS)) + text


def _lines(chance: random.Random) -> str:
    return "".join(chance.choice(WORDS) + chance.choice(LINES) for _ in range(chance.randint(1, 5)))


def _controls(chance: random.Random) -> str:
    return "".join(
        chance.choice(("", "a", " ", "1")) + chance.choice(CONTROLS) for _ in range(chance.randint(1, 8))
    )


def _spaces(chance: random.Random) -> str:
    return "".join(
        chance.choice(SPACES[: chance.choice((1, 2, len(SPACES)))]) * chance.randint(1, 70)
        + chance.choice(("", "a", "1", ".", "\n", "é"))
        for _ in range(chance.randint(1, 4))
    )


def _words(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 30))) + chance.choice(("", ".", "?!", " "))


def _any(chance: random.Random) -> str:
    """Characters from all over Unicode, assigned or not."""
    points = (chance.randrange(1, chance.choice((0x250, 0x3000, 0x10000, 0x110000))) for _ in range(12))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def _mixed(chance: random.Random) -> str:
    kinds = (_numbers, _code, _indents, _cjk, _emoji, _combining, _lines, _controls, _spaces, _words, _any)
    return "".join(kind(chance) for kind in chance.sample(kinds, k=3))
