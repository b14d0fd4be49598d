"""Each knob of the sampler, its distribution, and that a row stands alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.executor import SamplingParams
from model.sampler import InvalidLogits, prompt_logprobs, sample, uniform

VOCAB = 1000


@dataclass
class Sequence:
    params: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    prompt_len: int = 3
    eos_token_ids: frozenset[int] = frozenset({0})


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draws(row: torch.Tensor, n: int, **params: Any) -> list[int]:
    """Tokens drawn from one row with n different seeds."""
    sequences = [Sequence(SamplingParams(seed=seed, **params)) for seed in range(n)]
    return [s.token for s in sample(row.expand(n, -1), sequences)]


def one(row: torch.Tensor, sequence: Sequence) -> int:
    return sample(row[None], [sequence])[0].token


def test_temperature_zero_is_greedy() -> None:
    rows = logits(5)
    sampled = sample(rows, [Sequence(SamplingParams(temperature=0))] * 5)
    assert [s.token for s in sampled] == rows.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-4])
def test_the_coldest_draw_is_greedy(temperature: float) -> None:
    row = logits(1)[0]
    assert set(draws(row, 20, temperature=temperature)) == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    n, row = 20_000, logits(1, vocab=12)[0] / 3
    expected = (row.double() / temperature).softmax(-1).numpy() * n
    found = np.bincount(draws(row, n, temperature=temperature), minlength=12)
    # Chi-square with 11 degrees of freedom: above 31.3 in one of a thousand samplers; seeds are fixed.
    assert ((found - expected) ** 2 / expected).sum() < 31.3


def test_consecutive_tokens_are_independent() -> None:
    pairs = np.array([[uniform(seed, i) for i in range(200)] for seed in range(100)])
    assert abs(np.corrcoef(pairs[:, :-1].ravel(), pairs[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(pairs[:-1].ravel(), pairs[1:].ravel())[0, 1]) < 0.02
    assert abs(pairs.mean() - 0.5) < 0.01
    assert pairs.min() >= 0
    assert pairs.max() < 1


@given(seed=st.integers(-(2**63), 2**64), index=st.integers(0, 2**40))
def test_the_random_number_is_a_function_below_one(seed: int, index: int) -> None:
    assert 0 <= uniform(seed, index) < 1
    assert uniform(seed, index) == uniform(seed, index)


@pytest.mark.parametrize("k", [1, 2, 17, VOCAB - 1])
def test_top_k_keeps_the_k_likeliest(k: int) -> None:
    row = logits(1)[0]
    flat = draws(row, 3000, top_k=k, temperature=50.0)
    allowed = set(row.topk(k).indices.tolist())
    assert set(flat) <= allowed
    assert len(set(flat)) >= min(k, 500)


def test_ties_at_the_cut_go_to_the_lower_ids() -> None:
    row = torch.zeros(VOCAB)
    assert set(draws(row, 400, top_k=5)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.7, 0.95])
def test_top_p_keeps_the_smallest_nucleus(p: float) -> None:
    row = logits(1, vocab=40)[0]
    order = row.argsort(descending=True)
    before = row.double().softmax(-1)[order].cumsum(0) - row.double().softmax(-1)[order]
    allowed = set(order[before < p].tolist())
    found = set(draws(row, 4000, top_p=p))
    assert found <= allowed
    rare = row.double().softmax(-1).numpy()
    assert {token for token in allowed if rare[token] > 0.005} <= found


def test_top_p_counts_within_top_k() -> None:
    row = torch.tensor([4.0, 3, 2, 1]).log()
    # Of the two likeliest, 4/7 and 3/7: half is reached by the first alone; of all four it is not.
    assert set(draws(row, 200, top_k=2, top_p=0.5)) == {0}
    assert set(draws(row, 200, top_p=0.5)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = torch.tensor([1.0, 0.5, 0.24, 0.26]).log()
    assert set(draws(row, 500, min_p=0.25)) == {0, 1, 3}
    assert set(draws(row, 50, min_p=1.0)) == {0}


def test_repetition_penalty_sees_prompt_and_output() -> None:
    row = torch.full((10,), -20.0)
    row[[4, 5, 6]] = torch.tensor([3.0, 2.9, 1.9])
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    assert one(row, Sequence(params, tokens=[7], prompt_len=1)) == 4
    assert one(row, Sequence(params, tokens=[4], prompt_len=1)) == 5
    assert one(row, Sequence(params, tokens=[4, 5], prompt_len=1)) == 4  # 3/1.5 = 2 > 2.9/1.5
    assert one(-row.abs(), Sequence(params, tokens=[6], prompt_len=1)) == 6  # -1.9 * 1.5 = -2.85
    assert one(-row.abs(), Sequence(params, tokens=[6, 6, 4], prompt_len=1)) == 6


def test_frequency_and_presence_penalties_see_the_output_alone() -> None:
    row = torch.full((10,), -20.0)
    row[[4, 5]] = torch.tensor([3.0, 2.0])
    presence = SamplingParams(temperature=0, presence_penalty=1.5)
    frequency = SamplingParams(temperature=0, frequency_penalty=0.6)
    for params in (presence, frequency):
        assert one(row, Sequence(params, tokens=[4, 4, 4], prompt_len=3)) == 4
    assert one(row, Sequence(presence, tokens=[9, 4], prompt_len=1)) == 5
    assert one(row, Sequence(frequency, tokens=[9, 4], prompt_len=1)) == 4
    assert one(row, Sequence(frequency, tokens=[9, 4, 4], prompt_len=1)) == 5


def test_logit_bias_bans_and_forces() -> None:
    row = logits(1)[0]
    best, second = row.topk(2).indices.tolist()
    assert one(row, Sequence(SamplingParams(temperature=0, logit_bias={best: -100.0}))) == second
    assert set(draws(row, 50, logit_bias={7: 100.0})) == {7}


def test_min_tokens_masks_every_stop_token_until_reached() -> None:
    row = torch.tensor([9.0, 8, 7, 6])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    assert one(row, Sequence(params, tokens=[3], prompt_len=1)) == 2
    assert one(row, Sequence(params, tokens=[3, 2], prompt_len=1)) == 2
    assert one(row, Sequence(params, tokens=[3, 2, 2], prompt_len=1)) == 0


def test_an_end_token_beyond_the_vocabulary_changes_nothing() -> None:
    row = torch.tensor([9.0, 8, 7, 6])
    params = SamplingParams(temperature=0, min_tokens=1)
    sequence = Sequence(params, tokens=[3], prompt_len=1, eos_token_ids=frozenset({0, len(row)}))
    assert one(row, sequence) == 1
    sequence.eos_token_ids = frozenset({len(row)})
    assert one(row, sequence) == 0


KNOBS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 20]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logprobs": st.sampled_from([None, 0, 20]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(KNOBS, min_size=1, max_size=6), st.integers(0, 2**16), st.randoms(use_true_random=False))
def test_a_row_is_the_same_in_any_batch(knobs: list[dict[str, Any]], seed: int, random: Random) -> None:
    sequences = [Sequence(SamplingParams(**knob)) for knob in knobs]
    rows = logits(len(knobs), seed)
    alone = [sample(rows[i : i + 1], [sequence])[0] for i, sequence in enumerate(sequences)]
    before = rows.clone()
    order = list(range(len(knobs)))
    random.shuffle(order)
    together = sample(rows[order], [sequences[i] for i in order])
    assert together == [alone[i] for i in order]
    assert torch.equal(rows, before)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    rows = logits(2)
    expected = rows.double().log_softmax(-1)
    params = SamplingParams(temperature=2.0, top_k=1, logit_bias={5: 100.0}, logprobs=3)
    for i, found in enumerate(sample(rows, [Sequence(params)] * 2)):
        assert found.token == 5
        assert found.logprob == pytest.approx(expected[i, 5].item(), abs=1e-5)
        values, tokens = expected[i].topk(3)
        assert [token for token, _ in found.top] == tokens.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_no_alternatives_and_no_logprob_unless_asked() -> None:
    rows = logits(1)
    assert sample(rows, [Sequence(SamplingParams())])[0].logprob is None
    scored = sample(rows, [Sequence(SamplingParams(logprobs=0))])[0]
    assert scored.top == ()
    assert scored.logprob is not None


def test_prompt_logprobs_score_the_given_tokens() -> None:
    rows = logits(3)
    expected = rows.double().log_softmax(-1)
    scored = prompt_logprobs(rows, [10, 20, 30], 20)
    assert [s.token for s in scored] == [10, 20, 30]
    assert [s.logprob for s in scored] == pytest.approx(expected[range(3), [10, 20, 30]].tolist(), abs=1e-5)
    assert all(len(s.top) == 20 for s in scored)


def test_more_alternatives_than_tokens() -> None:
    assert len(prompt_logprobs(logits(1, vocab=5), [1], 20)[0].top) == 5


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams()])
def test_broken_rows_are_refused(value: float, params: SamplingParams) -> None:
    rows = logits(4)
    rows[1, 3] = rows[3, 0] = value
    with pytest.raises(InvalidLogits, match="not finite"):
        sample(rows, [Sequence(params)] * 4)
    sample(rows[[0, 2]], [Sequence(params)] * 2)
    with pytest.raises(InvalidLogits):
        prompt_logprobs(rows, [0] * 4, 1)
