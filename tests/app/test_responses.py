"""Outputs become choices: nothing lost, nothing leaked, every token beside its own text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.responses import Answer, Choice, Token, chat_logprobs, completion_logprobs, prompt_logprobs
from app.tokenizer import Tokenizer
from engine_actor.request import FinishReason, Output
from model.executor import Sampled

TEXTS = st.text("ab é🎉", min_size=1, max_size=12)


def outputs(tokens: list[int], reason: FinishReason = "length") -> list[Output]:
    last = len(tokens) - 1
    return [
        Output("r", i, Sampled(token, -0.5, ((token, -0.5),)), reason if i == last else None)
        for i, token in enumerate(tokens)
    ]


def answer(choice: Choice, tokens: list[int], reason: FinishReason = "length") -> Answer:
    collected = Answer()
    for output in outputs(tokens, reason):
        piece = choice.push(output)
        collected.add(piece)
        if piece.finish_reason is not None:
            break
    return collected


@given(text=TEXTS, stops=st.lists(st.text("ab é🎉", min_size=1, max_size=3), max_size=4))
@settings(max_examples=200, deadline=None)
def test_an_answer_is_the_text_before_the_earliest_stop_string(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    tokens = tokenizer.encode(text)
    got = answer(Choice(tokenizer, stops), tokens)
    if any(stop in text for stop in stops):
        assert got.finish_reason == "stop"
        assert text.startswith(got.text)
        assert any(text[len(got.text) :].startswith(stop) for stop in stops)
        assert not any(stop in got.text for stop in stops)
    else:
        assert got.text == text
        assert got.finish_reason == "length"
    shown = tokenizer.decode([token.sampled.token for token in got.tokens])
    assert shown.startswith(got.text) or "�" in shown
    for token in got.tokens:
        own = tokenizer.decode([token.sampled.token])
        assert "�" in own or text[token.offset :].startswith(own)


def test_tokens_wait_with_the_text_that_waits(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🎉!")
    choice = Choice(tokenizer, [])
    pieces = [choice.push(output) for output in outputs(tokens)]
    assert [piece.text for piece in pieces[:-2]] == [""] * (len(tokens) - 2)
    assert [len(piece.tokens) for piece in pieces[:-2]] == [0] * (len(tokens) - 2)
    assert pieces[-2].text == "🎉"
    assert len(pieces[-2].tokens) == len(tokens) - 1


def test_the_token_that_ends_an_answer_is_not_part_of_it(tokenizer: Tokenizer) -> None:
    eos = next(iter(tokenizer.eos_token_ids))
    hello = tokenizer.encode("Hello")
    ended = answer(Choice(tokenizer, []), [*hello, eos], "stop")
    assert (ended.text, len(ended.tokens)) == ("Hello", len(hello))
    ignored = answer(Choice(tokenizer, []), [*hello, eos, *hello])
    assert (ignored.text, len(ignored.tokens)) == ("HelloHello", 2 * len(hello) + 1)
    comma = tokenizer.encode(",")  # ordinary text, asked for as a stop_token_id
    chosen = answer(Choice(tokenizer, []), [*hello, *comma], "stop")
    assert (chosen.text, len(chosen.tokens)) == ("Hello", len(hello))
    held = answer(Choice(tokenizer, ["o,"]), [*hello, *comma], "stop")
    assert (held.text, len(held.tokens)) == ("Hello", len(hello))


def test_log_probabilities_are_shown_as_openai_shows_them(tokenizer: Tokenizer) -> None:
    half, word = tokenizer.encode("🎉")[0], tokenizer.encode(" cat")[0]
    tokens = [Token(Sampled(half, -0.1, ((word, float("-inf")),)), 0), Token(Sampled(word, None), 1)]
    shown = tokenizer.token_text(half)
    assert shown.startswith("\\x")
    chat = chat_logprobs(tokenizer, tokens)["content"]
    assert chat[0] == {
        "token": shown,
        "logprob": -0.1,
        "bytes": list(tokenizer.token_bytes(half)),
        "top_logprobs": [{"token": " cat", "logprob": -9999.0, "bytes": list(b" cat")}],
    }
    assert completion_logprobs(tokenizer, tokens) == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.1, None],
        "tokens": [f"bytes:{shown}", " cat"],
        "top_logprobs": [{" cat": -9999.0, f"bytes:{shown}": -0.1}, None],
    }


def test_a_prompt_token_outside_the_top_has_no_rank(tokenizer: Tokenizer) -> None:
    first, scores = prompt_logprobs(tokenizer, [Sampled(65, -3.0, ((66, -0.1), (67, -0.2)))], 2)
    assert first is None
    assert scores is not None
    assert {token: entry["rank"] for token, entry in scores.items()} == {"65": None, "66": 1, "67": 2}
