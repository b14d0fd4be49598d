"""Logits to tokens. Randomness is a counter, never a generator's state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from model.cpu import sampling as kernels
from model.executor import MAX_LOGPROBS, Sampled, Sequenced


class InvalidLogits(ValueError):
    """A row of logits has no largest finite value: NaN, infinite, or everything masked."""


def sample(logits: torch.Tensor, sequences: Sequence[Sequenced]) -> list[Sampled]:
    """Choose the next token of each sequence. logits: [len(sequences), vocab], fp32.

    Each row is treated on its own, so its token never depends on the others. Raises InvalidLogits
    if a row holds a NaN or is infinite.
    """
    best, likeliest = logits.max(dim=-1)  # the maximum of a row with a NaN is NaN
    _check(best)
    tokens = likeliest.tolist()
    altered = [i for i, s in enumerate(sequences) if not plain_greedy(s, len(s.tokens))]
    if altered:
        for i, token in zip(altered, _choose(logits[altered], [sequences[i] for i in altered]), strict=True):
            tokens[i] = token
    sampled = [Sampled(token) for token in tokens]
    scored = [i for i, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    if scored:
        tops = [sequences[i].params.logprobs or 0 for i in scored]
        for i, score in zip(scored, _score(logits[scored], [tokens[i] for i in scored], tops), strict=True):
            sampled[i] = score
    return sampled


def prompt_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Sampled]:
    """Score given tokens instead of choosing them. logits: [len(tokens), vocab], fp32.

    Log-probabilities are those of the unmodified distribution, with `top` alternatives each.
    """
    _check(logits.amax(dim=-1))
    return _score(logits, tokens, [top] * len(tokens))


def _score(logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Sampled]:
    rows = logits.cpu()
    normalisers = np.empty(len(rows))
    kernels.log_normalisers(rows.numpy(), normalisers)
    # Always as many as anyone may ask for: the order of equals must not depend on the neighbours' wish.
    values, alternatives = rows.topk(min(MAX_LOGPROBS, rows.shape[1]), dim=-1)
    own = rows.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).double().numpy() - normalisers
    others = values.double().numpy() - normalisers[:, None]
    return [
        Sampled(token, logprob, tuple(zip(ids[:top], logprobs[:top], strict=True)))
        for token, logprob, ids, logprobs, top in zip(
            tokens, own.tolist(), alternatives.tolist(), others.tolist(), tops, strict=True
        )
    ]


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) that chooses output token `index` of a request with this seed.

    A counter, hashed twice with the finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    """
    return (_mix(_mix(seed) + index) >> 11) / 2**53


def _mix(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _check(best: torch.Tensor) -> None:
    if not best.isfinite().all():
        raise InvalidLogits("the model's logits are not finite")


def plain_greedy(sequence: Sequenced, length: int) -> bool:
    """Whether the token after the first `length` of a sequence is the likeliest one, as the model has it."""
    p = sequence.params
    return p.temperature == 0 and not (
        p.logit_bias
        or p.repetition_penalty != 1
        or p.frequency_penalty
        or p.presence_penalty
        or length - sequence.prompt_len < p.min_tokens
    )


def end_tokens(sequence: Sequenced, vocab_size: int) -> list[int]:
    """What ends the sequence. A tokenizer may know an end token that the model's vocabulary lacks."""
    ends = {*sequence.eos_token_ids, *sequence.params.stop_token_ids}
    return [token for token in ends if token < vocab_size]


def _choose(logits: torch.Tensor, sequences: list[Sequenced]) -> list[int]:
    rows = logits.cpu().numpy()
    for row, sequence in zip(rows, sequences, strict=True):
        _adjust(row, sequence)
    params = [sequence.params for sequence in sequences]
    tokens = np.empty(len(rows), np.int64)
    kernels.choose_tokens(
        rows,
        np.array([p.temperature for p in params], np.float32),
        np.array([min(p.top_k, rows.shape[1]) for p in params], np.int64),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        np.array([uniform(s.params.seed, len(s.tokens) - s.prompt_len) for s in sequences]),
        tokens,
    )
    return tokens.tolist()


def _adjust(row: npt.NDArray[np.float32], sequence: Sequenced) -> None:
    """Apply the request's biases and penalties to its row, in vLLM's order.

    The repetition penalty looks at prompt and output, frequency and presence at the output alone.
    All are recomputed from the tokens, so they are the same after a preemption.
    """
    p = sequence.params
    for token, bias in p.logit_bias.items():
        row[token] += bias
    output = sequence.tokens[sequence.prompt_len :]
    if len(output) < p.min_tokens:
        row[end_tokens(sequence, len(row))] = -np.inf
    if p.repetition_penalty != 1:
        seen = np.unique(sequence.tokens)
        row[seen] = np.where(
            row[seen] > 0, row[seen] / p.repetition_penalty, row[seen] * p.repetition_penalty
        )
    if output and (p.frequency_penalty or p.presence_penalty):
        seen, counts = np.unique(output, return_counts=True)
        row[seen] -= p.frequency_penalty * counts + p.presence_penalty
