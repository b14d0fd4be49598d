"""The sampler in fixed shapes is the same function as the one on the CPU."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from model import sampler
from model.device_sampler import Chosen, Knobs, choose, uniform
from model.device_step import ROW_KNOBS, WHOLE_KNOBS, Ask
from model.executor import SamplingParams
from tests.model.test_sampler import Sequence, logits

VOCAB, LONGEST = 1000, 40


def chosen(rows: torch.Tensor, asks: list[Ask], *, scores: bool = True) -> Chosen:
    """What the device's sampler makes of rows of logits, the i-th sequence's tokens standing in slot i."""
    columns = zip(*(ask.knobs() for ask in asks), strict=True)
    knobs = {
        name: torch.tensor(column, dtype=torch.int64 if name in WHOLE_KNOBS else torch.float64)
        for name, column in zip(ROW_KNOBS, columns, strict=True)
    }
    vocab = rows.shape[1]
    biases = [(i * vocab + token, bias) for i, ask in enumerate(asks) for token, bias in ask.biases(vocab)]
    biased = torch.tensor([at for at, _ in biases] + [0], dtype=torch.int64)
    bias = torch.tensor([value for _, value in biases] + [0.0], dtype=torch.float32)
    history = torch.zeros(max(ask.slot for ask in asks) + 1, LONGEST, dtype=torch.int32)
    for ask in asks:
        history[ask.slot, : ask.length] = torch.tensor(ask.sequence.tokens)
    return choose(rows, Knobs(**knobs, biased=biased, bias=bias), history, draws=True, scores=scores)


def ask(slot: int, sequence: Sequence, **more: int) -> Ask:
    return Ask(slot, slot, len(sequence.tokens), sequence, **more)


def random_sequences(count: int, seed: int) -> list[Sequence]:
    rng = random.Random(seed)
    sequences = []
    for _ in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5, 1e-30]),
            top_k=rng.choice([0, 0, 1, 5, 40, VOCAB, 10 * VOCAB]),
            top_p=rng.choice([1.0, 1.0, 0.99, 0.9, 0.3, 1e-6]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.7, -0.4]),
            presence_penalty=rng.choice([0.0, 0.0, 1.1, -2.0]),
            logit_bias={rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.choice([0, 0, 3]))},
            min_tokens=rng.choice([0, 0, 10]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), 3)),
            seed=rng.getrandbits(80) - 2**79,
        )
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, LONGEST))]
        sequences.append(
            Sequence(params, tokens, rng.randint(1, len(tokens)), frozenset({rng.randrange(VOCAB)}))
        )
    return sequences


@pytest.mark.parametrize("coarse", [False, True])
def test_thousands_of_rows_get_the_tokens_that_the_cpu_draws(coarse: bool) -> None:
    """`coarse` logits have few values, as those that were rounded to bfloat16: full of equals."""
    for seed in range(8):
        rows = logits(500, seed=seed, vocab=VOCAB) * 2
        rows = rows.round() if coarse else rows
        sequences = random_sequences(len(rows), seed)
        expected = [s.token for s in sampler.sample(rows.clone(), sequences)]
        found = chosen(rows, [ask(i, sequence) for i, sequence in enumerate(sequences)])
        assert found.token.tolist() == expected
        assert found.finite.all()
        assert len(set(expected)) > 200


def test_the_random_number_is_the_same() -> None:
    rng = random.Random(4)
    pairs = [(rng.getrandbits(64) - 2**63, rng.getrandbits(20)) for _ in range(5000)]
    seeds, indices = torch.tensor(pairs).T
    assert uniform(seeds, indices).tolist() == [sampler.uniform(*pair) for pair in pairs]


def test_log_probabilities_are_the_cpus_to_single_precision() -> None:
    rows = logits(200, vocab=VOCAB)
    sequences = [Sequence(replace(s.params, logprobs=20)) for s in random_sequences(len(rows), 1)]
    found = chosen(rows, [ask(i, sequence, top=20) for i, sequence in enumerate(sequences)])
    assert found.scores is not None
    score, top_scores, top = found.scores
    for i, expected in enumerate(sampler.sample(rows.clone(), sequences)):
        assert abs(float(score[i]) - (expected.logprob or 0)) < 1e-5
        assert top[i].tolist() == [token for token, _ in expected.top]
        assert np.allclose(top_scores[i].numpy(), [logprob for _, logprob in expected.top], atol=1e-5)


def test_given_tokens_are_scored_and_nothing_is_drawn_for_them() -> None:
    rows = logits(6, vocab=VOCAB)
    targets = [5, 900, 0, 17, 999, 3]
    sequence = Sequence(SamplingParams(temperature=1.0))
    found = chosen(rows, [ask(i, sequence, target=target, top=2) for i, target in enumerate(targets)])
    assert found.token.tolist() == targets
    assert found.scores is not None
    for score, expected in zip(found.scores[0], sampler.prompt_logprobs(rows, targets, 2), strict=True):
        assert abs(float(score) - (expected.logprob or 0)) < 1e-5


def test_of_equals_the_lower_ids_are_told_first() -> None:
    rows = torch.zeros(1, VOCAB)
    rows[0, [7, 400]] = 1.0
    found = chosen(rows, [ask(0, Sequence(SamplingParams()), top=20)])
    assert found.scores is not None
    assert found.scores[2][0].tolist() == [7, 400, *range(7), *range(8, 19)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("nan")])
def test_a_row_that_is_not_finite_is_flagged_and_changes_no_other(bad: float) -> None:
    rows = logits(4, vocab=VOCAB)
    asks = [ask(i, sequence, top=3) for i, sequence in enumerate(random_sequences(4, 9))]
    expected = chosen(rows, asks)
    rows[2, 50:60] = bad
    found = chosen(rows, asks)
    assert found.finite.tolist() == [True, True, False, True]
    for mine, theirs in zip(_columns(found), _columns(expected), strict=True):
        assert torch.equal(mine[[0, 1, 3]], theirs[[0, 1, 3]])


def test_company_changes_no_bit() -> None:
    rows = logits(64, vocab=VOCAB)
    sequences = random_sequences(len(rows), 5)
    together = chosen(rows, [ask(i, sequence, top=20) for i, sequence in enumerate(sequences)])
    for i in range(0, 64, 7):
        alone = chosen(rows[i : i + 1], [ask(0, sequences[i], top=20)])
        for mine, theirs in zip(_columns(alone), _columns(together), strict=True):
            assert torch.equal(mine[0], theirs[i])


def _columns(found: Chosen) -> list[torch.Tensor]:
    assert found.scores is not None
    assert [field.name for field in fields(Chosen)] == ["token", "finite", "scores"]
    return [found.token, found.finite, *found.scores]
