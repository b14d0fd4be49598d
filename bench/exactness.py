"""Does company change an answer? Bits of every logits row, alone against a random busy mix."""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from bench import bare, options
from bench.report import Report
from engine_actor.engine import Engine
from engine_actor.request import Request
from engine_actor.scheduler import Mode
from model.batch import Batch, SlotModel
from model.executor import Executor, Sampled, SamplingParams
from model.model_executor import ModelExecutor
from model.storage import SlotStorage
from policies.base import Policy
from policies.fcfs import Fcfs

Position = tuple[str, int]
"""A request and an output index."""
CERTAIN = 100.0
"""A bias beyond what logits differ by: OpenAI's largest."""


class Recorder:
    """The model, remembering a digest of the logits behind each output token."""

    def __init__(self, model: SlotModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.owners: Callable[[], dict[int, Request]] = dict
        self.digests: dict[Position, bytes] = {}

    def engine(self, storage: SlotStorage, policy: Policy, kv_budget: int | None = None) -> Engine:
        """An engine on this recorder."""
        engine = Engine(ModelExecutor(self, storage), policy, kv_budget=kv_budget)
        self.owners = lambda: {request.slot: request for request in engine.scheduler.running}
        return engine

    def row_count(self, rows: int) -> int:
        return self.model.row_count(rows)

    def forward(self, batch: Batch, storage: SlotStorage) -> torch.Tensor:
        logits = self.model.forward(batch, storage)
        owners = self.owners()
        for row, bits in zip(batch.logit_rows, logits.cpu().numpy(), strict=True):
            if batch.slots[row] == storage.scratch:
                continue  # a static batch's padding
            request = owners[int(batch.slots[row])]
            index = int(batch.positions[row]) + 1 - request.prompt_len
            self.digests[request.id, index] = hashlib.blake2b(bits.tobytes(), digest_size=16).digest()
        return logits


@dataclass(slots=True)
class Trail:
    """What a run left behind: the digest of each logits row, and the tokens."""

    digests: dict[Position, bytes] = field(default_factory=dict)
    tokens: dict[Position, Sampled] = field(default_factory=dict)
    """Chosen tokens; under negative indices, the scores of prompt tokens."""
    steps: int = 0
    preemptions: int = 0
    resumes: int = 0
    chunks: int = 0
    reused: int = 0
    """Tokens that requests found computed by others."""
    copied: int = 0
    evicted: int = 0
    stops: int = 0
    """Requests that ended by a stop token or the end of sequence, and not by their length."""
    late_stops: int = 0
    """Those of them that had been preempted or resumed."""

    @property
    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("digests", "tokens")}

    def differs_at(self, other: Trail) -> list[Position]:
        """Positions whose logits bits, token or scores differ, or that stand in one of the two only."""
        keys = self.digests.keys() | other.digests.keys() | self.tokens.keys() | other.tokens.keys()
        return sorted(
            key
            for key in keys
            if self.digests.get(key) != other.digests.get(key)
            or self.tokens.get(key) != other.tokens.get(key)
        )


def random_requests(
    rng: random.Random, count: int, vocab_size: int, longest_prompt: int, longest_output: int
) -> list[Request]:
    """Random prompts, of which most begin like others: some with a stem that many share, some as the next
    turn of an earlier one. Half greedy, half sampled by seed with every filter and penalty in play.

    Of the sampled ones every other ends as soon as `min_tokens` lets it, by a token of its own or by the
    end of sequence: a bias makes that token the likeliest at every step.
    """
    requests: list[Request] = []
    stems = [[rng.randrange(vocab_size) for _ in range(longest_prompt // 2)] for _ in range(3)]
    for number in range(count):
        params = SamplingParams(
            max_tokens=rng.randint(1, longest_output),
            temperature=0.0,
            ignore_eos=True,
            seed=rng.getrandbits(32),
        )
        if number % 2:
            params = replace(
                params,
                temperature=rng.uniform(0.3, 1.5),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 40]),
                min_p=rng.choice([0.0, 0.05]),
                repetition_penalty=rng.choice([1.0, 1.1]),
                frequency_penalty=rng.choice([0.0, 0.5]),
                presence_penalty=rng.choice([0.0, 0.5]),
                logit_bias={rng.randrange(vocab_size): 5.0},
            )
        ends: frozenset[int] = frozenset()
        if number % 4 == 1:
            last = rng.randrange(vocab_size)
            ends = frozenset({last}) if number % 8 == 1 else ends
            params = replace(
                params,
                logit_bias=params.logit_bias | {last: CERTAIN},
                min_tokens=rng.randrange(params.max_tokens),
                stop_token_ids=() if ends else (last,),
                ignore_eos=not ends,
            )
        if number % 3 == 0:
            params = replace(params, logprobs=3, prompt_logprobs=1)
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest_prompt))]
        if number % 4 == 2:
            prompt = [*rng.choice(stems), *prompt][:longest_prompt]
        elif number % 4 == 3:
            prompt = [*rng.choice(requests).prompt, *prompt][:longest_prompt]
        requests.append(Request(f"r{number}", prompt, params, ends, arrival=float(number)))
    return requests


def run_alone(
    model: SlotModel,
    storage: SlotStorage,
    requests: list[Request],
    advance: Callable[[], None],
    executor: Executor | None = None,
) -> Trail:
    """Each request in an engine of its own, one after the other. An executor given leaves no digests."""
    trail = Trail()
    for request in requests:
        _drive(model, storage, [_again(request)], trail, random.Random(0), "chunked", executor, disturb=False)
        advance()
    return trail


def run_busy(
    model: SlotModel,
    storage: SlotStorage,
    requests: list[Request],
    rng: random.Random,
    mode: Mode,
    advance: Callable[[], None],
    executor: Executor | None = None,
) -> Trail:
    """All together: joining at random steps, in random chunks, forgotten and resumed at random points, with
    what others have computed."""
    trail = Trail()
    shuffled = [_again(request) for request in requests]
    rng.shuffle(shuffled)
    _drive(model, storage, shuffled, trail, rng, mode, executor, disturb=True, advance=advance)
    return trail


def _again(request: Request, resumed: Sequence[int] = ()) -> Request:
    params = replace(request.params, prompt_logprobs=None) if resumed else request.params
    eos, arrival = request.eos_token_ids, request.arrival
    return Request(request.id, request.prompt, params, eos, arrival=arrival, resumed=list(resumed))


def _drive(
    model: SlotModel,
    storage: SlotStorage,
    requests: list[Request],
    trail: Trail,
    rng: random.Random,
    mode: Mode,
    executor: Executor | None,
    *,
    disturb: bool,
    advance: Callable[[], None] = lambda: None,
) -> None:
    recorder = Recorder(model)
    engine = Engine(executor or ModelExecutor(recorder, storage), Fcfs(), mode=mode)
    scheduler = engine.scheduler
    ample = scheduler.kv_budget
    recorder.owners = lambda: {request.slot: request for request in scheduler.running}
    joining = list(requests)
    resumed: set[str] = set()
    taken_in: list[Request] = []
    while joining or engine.has_work():
        scheduler.kv_budget = ample
        while joining and (not disturb or not engine.has_work() or rng.random() < 0.4):
            taken_in.append(joining.pop())
            engine.submit(taken_in[-1])
        if disturb:
            decoding = [r for r in scheduler.running if r.num_output]
            if decoding and rng.random() < 0.1:
                # What a replica does when its engine dies: the same request, with the output so far.
                lost = rng.choice(decoding)
                engine.abort(lost.id)
                joining.append(_again(lost, resumed=lost.output))
                resumed.add(lost.id)
                trail.resumes += 1
            scheduler.max_step_tokens = rng.randint(storage.num_slots + 1, storage.num_slots + 64)
            # A budget below what is cached makes the scheduler forget somebody in this step.
            cached = sum(len(request.tokens) for request in scheduler.running)
            scheduler.kv_budget = rng.randint(1, cached) if cached and rng.random() < 0.2 else ample
        outputs, record = engine.step()
        if record.errors:
            raise RuntimeError(next(output.error for output in outputs if output.error))
        trail.steps += 1
        trail.chunks += sum(share.kind == "prefill" for share in record.shares)
        trail.reused += sum(record.reused.values())
        trail.copied += record.copied
        trail.evicted += record.evicted
        for output in outputs:
            if output.sampled is not None:
                trail.tokens[output.request_id, output.index] = output.sampled
            for index, score in enumerate(output.prompt_scores):
                trail.tokens[output.request_id, -1 - index] = score
            if output.finish_reason is not None:
                advance()
            if output.finish_reason == "stop":
                trail.stops += 1
                trail.late_stops += output.num_preemptions > 0 or output.request_id in resumed
    trail.digests |= recorder.digests
    trail.preemptions += sum(request.num_preemptions for request in taken_in)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser, max_len=512)
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    report = Report("exactness", args.out)
    model = bare.load(args.model)
    storage = model.new_storage(args.slots, args.max_len, poison=True)
    rng = random.Random(args.seed)
    requests = random_requests(rng, args.requests, model.vocab_size, 160, 40)
    with report.progress("alone", args.requests) as advance:
        alone = run_alone(model, storage, requests, advance)
    busy: dict[str, dict[str, int]] = {}
    for mode in reversed(get_args(Mode)):
        with report.progress(f"busy, {mode}", args.requests) as advance:
            trail = run_busy(model, storage, requests, rng, mode, advance)
        busy[mode] = {"different": len(alone.differs_at(trail)), "positions": len(trail.digests)}
        busy[mode] |= trail.counts
    report.records(
        f"{args.requests} requests, alone ({alone.steps} steps) against busy, {args.slots} slots",
        [{"mode": mode, **counts} for mode, counts in busy.items()],
        "mode | positions | steps | prefill chunks: chunks | preemptions | resumes | tokens reused: reused | "
        "copied | evicted | stops | after a preemption or resume: late_stops | different",
    )

    def by_mode(count: str) -> dict[str, int]:
        return {mode: counts[count] for mode, counts in busy.items()}

    report.note("Every position compares all bits of a logits row and the token chosen from it.")
    report.at_most("different positions", sum(by_mode("different").values()), 0)
    reused, late_stops = by_mode("reused"), by_mode("late_stops")
    report.at_least("tokens that others had computed, fewest of all modes", min(reused.values()), 1)
    what = "stop tokens after a preemption or resume, fewest of all modes"
    report.at_least(what, min(late_stops.values()), 1)
    totals = {n: sum(by_mode(n).values()) for n in ("positions", "different", "preemptions", "resumes")}
    told = {"different_by_mode": by_mode("different"), "reused_tokens_by_mode": reused}
    told |= {"late_stops_by_mode": late_stops}
    return report.finish({**totals, **told, "row_counts": model.row_counts.as_dict()})
