"""A step on a device: one copy in, recorded kernels from embedding to token, one copy out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch

from model.batch import Batch
from model.device import Block, Runtime
from model.device_sampler import Knobs, choose
from model.executor import MAX_LOGPROBS, Sampled, Sequenced
from model.paged_attention import RUN_PLACES, DeviceRows, PagedAttention, Runs
from model.sampler import InvalidLogits, end_tokens, plain_greedy
from model.storage import SlotStorage
from model.transformer import Transformer

BIASES_PER_ROW = 64
"""Biases and masked tokens that a pass has room for, for each row of logits that it has room for."""
ROW_KNOBS = tuple(field.name for field in fields(Knobs) if not field.name.startswith("bias"))
WHOLE_KNOBS = ("slot", "length", "prompt_len", "seed", "top_k", "target")


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted of one row's logits."""

    row: int
    """Of the batch."""
    slot: int
    length: int
    """Tokens of the sequence up to and with the row's."""
    sequence: Sequenced
    target: int | None = None
    """A token to be scored; None: draw one."""
    top: int | None = None
    """Alternatives to be told with their log-probabilities; None: no log-probability either."""

    @property
    def draws(self) -> bool:
        """Whether it is more than the likeliest token."""
        return self.target is None and not plain_greedy(self.sequence, self.length)

    def knobs(self) -> tuple[float, ...]:
        """The values of ROW_KNOBS."""
        p = self.sequence.params
        return (
            self.slot,
            self.length,
            self.sequence.prompt_len,
            (p.seed + 2**63) % 2**64 - 2**63,
            p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
            p.repetition_penalty,
            p.frequency_penalty,
            p.presence_penalty,
            -1 if self.target is None else self.target,
        )

    def biases(self, vocab_size: int) -> list[tuple[int, float]]:
        """What is added to the logits of which token. Raises ValueError if there is no such token."""
        p = self.sequence.params
        biases = [*p.logit_bias.items()]
        if self.length - self.sequence.prompt_len < p.min_tokens:
            biases += [(token, -np.inf) for token in end_tokens(self.sequence, vocab_size)]
        if not all(0 <= token < vocab_size for token, _ in biases):
            raise ValueError(f"logit_bias names tokens beyond 0..{vocab_size - 1}")
        return biases


@dataclass(frozen=True, slots=True)
class Pass:
    """A part of a batch that has room in the buffers."""

    batch: Batch
    asks: list[Ask]
    biases: list[tuple[int, int, float]]
    """Place of the ask, token, bias."""

    @property
    def draws(self) -> bool:
        return any(ask.draws for ask in self.asks)

    @property
    def scores(self) -> bool:
        return any(ask.top is not None for ask in self.asks)


class DeviceStep:
    """A model, its slots, and the buffers that every step goes through.

    Shapes never change: rows are padded to one of the row counts at which results are exact, and each count
    has its own recording. What does not fit into the buffers goes through them in several passes.
    """

    def __init__(self, model: Transformer, storage: SlotStorage, runtime: Runtime) -> None:
        assert isinstance(model.attention, PagedAttention)
        self._model, self._attention = model, model.attention
        self._storage = storage
        self._runtime = runtime
        self._most_rows, self._most_asks = model.row_counts.kept[-1], model.head_row_counts.kept[-1]
        self._most_biases = self._most_asks * BIASES_PER_ROW
        rows, asks, runs = (self._most_rows,), (self._most_asks,), (RUN_PLACES,)
        tops = (self._most_asks, min(MAX_LOGPROBS, model.vocab_size))
        knobs = {name: (np.int64 if name in WHOLE_KNOBS else np.float64, asks) for name in ROW_KNOBS}
        self._plan = Block(
            runtime,
            {
                "tokens": (np.int64, rows),
                "positions": (np.int64, rows),
                "slots": (np.int64, rows),
                "keys": (np.int32, rows),
                "long": (np.bool_, rows),
                "bounds": (np.int32, (RUN_PLACES + 1,)),
                "run_keys": (np.int32, runs),
                "run_slots": (np.int32, runs),
                "logit_rows": (np.int64, asks),
                **knobs,
                "biased": (np.int64, (self._most_biases,)),
                "bias": (np.float32, (self._most_biases,)),
            },
        )
        self._results = Block(
            runtime,
            {
                "token": (np.int64, asks),
                "finite": (np.bool_, asks),
                "score": (np.float64, asks),
                "top_scores": (np.float64, tops),
                "top": (np.int64, tops),
            },
        )
        device, dtype = storage.keys.device, model.backend.dtype
        self._hidden = torch.zeros(self._most_asks, model.config.hidden_size, dtype=dtype, device=device)
        shape = (storage.num_slots + 1, storage.max_len)
        self._history = torch.zeros(shape, dtype=torch.int32, device=device)
        """The tokens of each slot's sequence: penalties look at them."""
        self._forwards: dict[tuple[int, bool], Callable[[], None]] = {}
        self._samplers: dict[tuple[int, bool, bool], Callable[[], None]] = {}
        with torch.inference_mode():
            self._record()

    def _record(self) -> None:
        # The largest first: the others find room in what those have left.
        for count in reversed(self._model.row_counts.kept):
            for long in (True, False) if count > 1 else (False,):
                forward = partial(self._forward, count, long)
                self._forwards[count, long] = self._runtime.record(forward)
        for count in reversed(self._model.head_row_counts.kept):
            for draws in (True, False):
                for scores in (True, False):
                    sample = partial(self._sample, count, draws, scores)
                    self._samplers[count, draws, scores] = self._runtime.record(sample)

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` tokens of `slot` are those of `source` now."""
        self._history[slot, :length] = self._history[source, :length]

    def passes(self, batch: Batch, asks: Sequence[Ask]) -> Iterator[Pass]:
        """Cut a batch, whose asks ascend by row, into passes.

        Raises ValueError if a token, position or slot is out of range, or if one row has more biases than
        there is room for.
        """
        self._model.check(batch, self._storage)
        waiting = list(reversed(asks))
        start = 0
        while start < len(batch):
            end = min(start + self._most_rows, len(batch))
            taken: list[Ask] = []
            biases: list[tuple[int, int, float]] = []
            while waiting and waiting[-1].row < end:
                ask = waiting[-1]
                more = ask.biases(self._model.vocab_size) if ask.draws else []
                if len(more) > self._most_biases:
                    raise ValueError(f"a request may have {self._most_biases} biases and end tokens here")
                if len(taken) == self._most_asks or len(biases) + len(more) > self._most_biases:
                    end = ask.row
                    break
                biases += [(len(taken), token, bias) for token, bias in more]
                taken.append(waiting.pop())
            rows = slice(start, end)
            logit_rows = np.array([ask.row - start for ask in taken], np.int64)
            part = Batch(batch.tokens[rows], batch.positions[rows], batch.slots[rows], logit_rows)
            yield Pass(part, taken, biases)
            start = end

    @torch.inference_mode()
    def launch(self, part: Pass) -> None:
        """Set the device to work on a pass. The one before must have been collected."""
        count, long = self._fill(part)
        self._plan.to_device()
        self._forwards[count, long]()
        if part.asks:
            (asks,) = self._model.head_row_counts.tiles(len(part.asks))
            self._samplers[asks, part.draws, part.scores]()
            self._results.to_host(None if part.scores else "score")

    def collect(self, part: Pass) -> list[Sampled | InvalidLogits]:
        """Wait for what was launched, and say what came of each ask."""
        self._runtime.wait()
        result = self._results.host
        count = len(part.asks)
        tokens, finite = result["token"][:count].tolist(), result["finite"][:count].tolist()
        chosen: list[Sampled | InvalidLogits] = []
        for place, ask in enumerate(part.asks):
            if not finite[place]:
                chosen.append(InvalidLogits("the model's logits are not finite"))
            elif ask.top is None:
                chosen.append(Sampled(tokens[place]))
            else:
                alternatives = (result[name][place, : ask.top].tolist() for name in ("top", "top_scores"))
                score = float(result["score"][place])
                chosen.append(Sampled(tokens[place], score, tuple(zip(*alternatives, strict=True))))
        return chosen

    def _fill(self, part: Pass) -> tuple[int, bool]:
        """Write a pass into the plan. Returns the row count, and whether there are long runs."""
        plan, batch = self._plan.host, part.batch
        (count,) = self._model.row_counts.tiles(len(batch))
        for name, column, fill in (
            ("tokens", batch.tokens, 0),
            ("positions", batch.positions, 0),
            ("slots", batch.slots, self._storage.scratch),
        ):
            plan[name][: len(batch)] = column
            plan[name][len(batch) : count] = fill
        runs = Runs.of(plan["positions"][:count], plan["slots"][:count])
        for name in ("keys", "long"):
            plan[name][:count] = getattr(runs, name)
        for name in ("bounds", "run_keys", "run_slots"):
            plan[name][:] = getattr(runs, name)
        plan["logit_rows"][: len(part.asks)] = batch.logit_rows
        plan["logit_rows"][len(part.asks) :] = 0
        if part.asks:
            columns = zip(*(ask.knobs() for ask in part.asks), strict=True)
            for name, values in zip(ROW_KNOBS, columns, strict=True):
                plan[name][: len(part.asks)] = values
        vocab = self._model.vocab_size
        plan["biased"][: len(part.biases)] = [place * vocab + token for place, token, _ in part.biases]
        plan["bias"][: len(part.biases)] = [bias for *_, bias in part.biases]
        plan["biased"][len(part.biases) :] = plan["bias"][len(part.biases) :] = 0
        return count, bool(runs.long.any())

    def _forward(self, count: int, long: bool) -> None:
        plan = self._plan.device
        positions, slots = plan["positions"][:count], plan["slots"][:count]
        rows = DeviceRows(
            positions,
            slots,
            plan["keys"][:count],
            plan["long"][:count] if long else None,
            plan["bounds"],
            plan["run_keys"],
            plan["run_slots"],
        )
        self._attention.attend(rows, self._storage)
        hidden = self._model.hidden(plan["tokens"][:count])
        self._history[slots, positions] = plan["tokens"][:count].int()
        self._hidden.copy_(hidden[plan["logit_rows"]])

    def _sample(self, count: int, draws: bool, scores: bool) -> None:
        plan, results = self._plan.device, self._results.device
        knobs = Knobs(
            **{name: plan[name][:count] for name in ROW_KNOBS}, biased=plan["biased"], bias=plan["bias"]
        )
        logits = self._model.weights.head(self._hidden[:count]).float()
        chosen = choose(logits, knobs, self._history, draws=draws, scores=scores)
        results["token"][:count] = chosen.token
        results["finite"][:count] = chosen.finite
        if chosen.scores is not None:
            for name, values in zip(("score", "top_scores", "top"), chosen.scores, strict=True):
                results[name][:count] = values
