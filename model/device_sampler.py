"""Logits to tokens where the logits are, in shapes that never change: for a device that runs recorded steps.

The same function of logits, parameters and (seed, index) as `model.sampler`. Sums are integers: no bit
depends on the order in which a device adds up, and so none on how many rows share the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.executor import MAX_LOGPROBS

ONE = 2.0**42
"""A weight of 1 as an integer: 2**20 of them fit."""
DIGIT = 10
"""Bits of a weight that are looked at together when one is looked for in the order of all."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the rows of a step ask for; one value each, on the device, [n] unless said otherwise."""

    slot: torch.Tensor
    """Whose history holds the tokens of the row's sequence."""
    length: torch.Tensor
    """Tokens of the sequence."""
    prompt_len: torch.Tensor
    seed: torch.Tensor
    """int64, modulo 2**64."""
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    target: torch.Tensor
    """A token to be scored, or -1 to draw one."""
    biased: torch.Tensor
    """[biases] row * vocabulary + token. Surplus ones are 0, and so is their bias."""
    bias: torch.Tensor
    """[biases] what is added to it, minus infinity included."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What came of the rows."""

    token: torch.Tensor
    """[n] int64"""
    finite: torch.Tensor
    """[n] bool: whether the row has a largest finite value. If not, the rest means nothing."""
    scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """[n] log-probability of the token, [n, tops] of the likeliest, [n, tops] those; fp64, fp64, int64."""


def choose(logits: torch.Tensor, knobs: Knobs, history: torch.Tensor, *, draws: bool, scores: bool) -> Chosen:
    """Choose a token for each row.

    logits: [n, vocab] fp32; history: [slots, max_len] int32 token ids. Without `draws` the rows are those of
    plain greedy requests or are only scored; without `scores` nobody asked for log-probabilities.
    """
    best, token = logits.max(dim=-1)  # of equals the first; the maximum of a row with a NaN is NaN
    if draws:
        drawn = _draw(_adjust(logits, knobs, history), knobs)
        token = torch.where(knobs.target < 0, drawn, token)
    token = torch.where(knobs.target < 0, token, knobs.target)
    return Chosen(token, best.isfinite(), _score(logits, best, token) if scores else None)


def uniform(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """See `model.sampler.uniform`. seed, index: int64, which wraps around. Returns fp64."""
    return _shifted(_mix(_mix(seed) + index), 11).double() / 2**53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits, as if x had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _adjust(logits: torch.Tensor, knobs: Knobs, history: torch.Tensor) -> torch.Tensor:
    """Biases, masks and penalties, in the order of `model.sampler`. A new tensor."""
    n, vocab = logits.shape
    logits = logits.flatten().scatter_add(0, knobs.biased, knobs.bias).view(n, vocab)
    # Every token once in the low half of a count and, if it is of the output, once in the high half.
    position = torch.arange(history.shape[1], device=history.device)
    known = position < knobs.length[:, None]
    once = known.long() + ((known & (position >= knobs.prompt_len[:, None])).long() << 32)
    counts = torch.zeros(n, vocab, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(1, history[knobs.slot].long(), once)
    repetition = knobs.repetition.float()[:, None]
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, penalised, logits)
    output = counts >> 32
    loss = knobs.frequency[:, None] * output.double() + knobs.presence[:, None]
    return torch.where(output > 0, (logits.double() - loss).float(), logits)


def _draw(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """Filter, then invert the distribution, row by row."""
    top, best = logits.max(dim=-1)
    temperature = knobs.temperature.float()
    greedy = temperature == 0
    weights = torch.exp((logits - top[:, None]) / torch.where(greedy, 1.0, temperature)[:, None])
    masses = (weights.double() * ONE).long()
    kept = (weights >= knobs.min_p.float()[:, None]) & (weights > 0)
    everything = torch.full_like(knobs.top_k, 2**62)
    kept = _cut(weights, masses, kept, torch.where(knobs.top_k > 0, knobs.top_k, everything), everything)
    nucleus = ((masses * kept).sum(-1).double() * knobs.top_p).ceil().long().clamp(min=1)
    kept = _cut(weights, masses, kept, everything, torch.where(knobs.top_p < 1, nucleus, everything))
    reached = (masses * kept).cumsum(-1)
    target = (uniform(knobs.seed, knobs.length - knobs.prompt_len) * reached[:, -1].double()).long()
    drawn = (reached <= target[:, None]).sum(-1)
    return torch.where(greedy | (drawn >= logits.shape[1]), best, drawn)


def _cut(
    weights: torch.Tensor, masses: torch.Tensor, kept: torch.Tensor, most: torch.Tensor, mass: torch.Tensor
) -> torch.Tensor:
    """Of the kept weights those of largest value (of equals the first) until they are `most` or reach `mass`.

    Nothing is sorted: weights in (0, 1] order as their 30 bits do, and the last one taken is looked for digit
    by digit.
    """
    bits = (weights.view(torch.int32) & (1 << 3 * DIGIT) - 1).long()  # a NaN has more
    equal, last = kept, torch.zeros_like(most)
    for shift in (2 * DIGIT, DIGIT, 0):
        digit, most, mass = _last_digit(bits >> shift, masses, equal, most, mass)
        last = (last << DIGIT) + digit
        equal = equal & (bits >> shift == last[:, None])
    each = torch.where(equal, masses, 0).amax(-1).clamp(min=1)
    taken = torch.minimum(most, (mass + each - 1) // each).clamp(min=1)
    return kept & (bits > last[:, None]) | equal & (equal.cumsum(-1) <= taken[:, None])


def _last_digit(
    bits: torch.Tensor, masses: torch.Tensor, kept: torch.Tensor, most: torch.Tensor, mass: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last digit of the kept one that, counted from the largest down, makes `most` or reaches `mass`.

    Returns [n] the digit, and what is left of `most` and `mass` for those that have it.
    """
    digits = bits & 2**DIGIT - 1
    none = torch.zeros(len(bits), 2**DIGIT, dtype=torch.int64, device=bits.device)
    counts = none.scatter_add(1, digits, kept.long()).flip(1)
    sums = none.scatter_add(1, digits, masses * kept).flip(1)
    reached = (counts.cumsum(1) >= most[:, None]) | (sums.cumsum(1) >= mass[:, None])
    reached[:, -1] = True
    at = reached.int().argmax(-1, keepdim=True)  # the first
    more, larger = ((each.cumsum(1) - each).gather(1, at).squeeze(1) for each in (counts, sums))
    return 2**DIGIT - 1 - at.squeeze(1), most - more, mass - larger


def _score(
    logits: torch.Tensor, best: torch.Tensor, token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the unmodified distribution: see Chosen."""
    masses = (torch.exp(logits - best[:, None]).double() * ONE).long().sum(-1)
    normaliser = best.double() + torch.log(masses.double() / ONE)
    bits = logits.view(torch.int32)
    # In the order of the floats, and of equals the lower id first: devices choose among equals as they like.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    ids = torch.arange(logits.shape[1], device=logits.device)
    top = (ordered - ids).topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    values, own = (logits.gather(1, at).double() for at in (top.indices, token[:, None]))
    return (own[:, 0] - normaliser), values - normaliser[:, None], top.indices
