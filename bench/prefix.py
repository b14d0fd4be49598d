"""What remembering saves: chats that resend their history, and prompts that share a beginning.

The bare engine with `prefix_reuse` off and on, the same work for both. Chats come at random (Poisson) and
think between their turns (exponential), from a seed; a prompt is the whole history with the real answers.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from typing import Any

from bench import bare, options
from bench.chart import CONTINUOUS, STATIC
from bench.report import Advance, Report
from bench.samples import percentiles
from engine_actor.engine import Engine
from engine_actor.request import Request
from engine_actor.scheduler import Reuse
from model.executor import Executor, SamplingParams
from model.timed_executor import TimedExecutor
from policies.fcfs import Fcfs

SIDES: tuple[Reuse, Reuse] = ("off", "tenant")
ANSWER = 24
"""Output tokens of a turn."""


@dataclass
class Chat:
    """What a user has said and been told; `said` holds what is still to be said, turn by turn."""

    starts: float
    said: list[list[int]]
    thinks: list[float]
    history: list[int] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)


@dataclass
class Outcome:
    """A run: seconds, requests in the order of their turns, and what was found computed."""

    seconds: float
    asked: list[list[Request]]
    computed: int = 0
    reused: int = 0

    @property
    def outputs(self) -> list[list[list[int]]]:
        return [[request.output for request in chat] for chat in self.asked]

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens that users were served, computed or not."""
        return sum(len(request.tokens) for chat in self.asked for request in chat) / self.seconds

    def ttfts(self, first_turn: int) -> list[float]:
        return [
            request.first_token - request.arrival
            for chat in self.asked
            for request in chat[first_turn:]
            if request.first_token is not None
        ]


def chats(
    count: int, turns: int, history: int, vocab: int, *, gap: float, think: float, seed: int, stem: int = 0
) -> list[Chat]:
    """Chats that come every `gap` seconds or so, whose history reaches `history` tokens after their turns."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(stem)]
    starts, found = 0.0, []
    for _ in range(count):
        size = max(1, (history - stem) // turns - ANSWER)
        said = [
            [rng.randrange(vocab) for _ in range(max(1, round(size * rng.uniform(0.7, 1.3))))]
            for _ in range(turns)
        ]
        said[0] = shared + said[0]
        found.append(Chat(starts, said, [rng.expovariate(1 / think) if think else 0.0 for _ in said]))
        starts += rng.expovariate(1 / gap) if gap else 0.0
    return found


def drive(engine: Engine, work: list[Chat], advance: Advance) -> Outcome:
    """Step until every chat has said and heard all."""
    outcome = Outcome(0.0, [chat.asked for chat in work])
    began = engine.clock()
    due = [(began + chat.starts, index) for index, chat in enumerate(work)]
    open_turns: dict[str, int] = {}
    while due or engine.has_work():
        now = engine.clock()
        for at, index in [entry for entry in due if entry[0] <= now]:
            due.remove((at, index))
            chat = work[index]
            chat.history += chat.said[len(chat.asked)]
            params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
            request = Request(f"{index}-{len(chat.asked)}", list(chat.history), params, arrival=at)
            chat.asked.append(request)
            open_turns[request.id] = index
            engine.submit(request)
        if not engine.has_work():
            time.sleep(max(0.0, min(at for at, _ in due) - engine.clock()))
            continue
        outputs, record = engine.step()
        outcome.computed += record.rows
        outcome.reused += sum(record.reused.values())
        for output in outputs:
            if output.finish_reason is not None:
                index = open_turns.pop(output.request_id)
                chat = work[index]
                chat.history += chat.asked[-1].output
                advance()
                if len(chat.asked) < len(chat.said):
                    due.append((engine.clock() + chat.thinks[len(chat.asked)], index))
    outcome.seconds = engine.clock() - began
    return outcome


def best_hits(work: list[Chat], outcome: Outcome) -> float:
    """The share of prompt tokens that an infinite cache would have had."""
    prompts = [request.prompt_len for chat in work for request in chat.asked]
    known = [len(one.tokens) - 1 for chat in work for one, _ in zip(chat.asked, chat.asked[1:], strict=False)]
    return sum(known) / sum(prompts)


def bookkeeping(reuse: Reuse, executor: Executor, work: list[Chat]) -> float:
    """Seconds that scheduling this work takes where computing takes none."""
    engine = Engine(executor, Fcfs(), prefix_reuse=reuse)
    started = time.process_time()
    drive(engine, work, lambda steps=1.0: None)
    return time.process_time() - started


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--chats", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--history", type=int, default=1500, help="tokens in the end (default: %(default)s)")
    parser.add_argument("--gap", type=float, default=4.0, help="seconds between chats (default: %(default)s)")
    parser.add_argument("--think", type=float, default=2.0, help="seconds, on average (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="that share a prompt (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of it (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    report = Report("prefix", args.out)
    model = bare.load(args.model)
    vocab = model.vocab_size

    def conversations() -> list[Chat]:
        return chats(
            args.chats, args.turns, args.history, vocab, gap=args.gap, think=args.think, seed=args.seed
        )

    def shared() -> list[Chat]:
        longest = args.prompt + 64
        return chats(args.requests, 1, longest, vocab, gap=0, think=0, seed=args.seed, stem=args.prompt)

    def strangers() -> list[Chat]:
        return chats(args.requests, 1, args.prompt, vocab, gap=0, think=0, seed=args.seed)

    found: dict[str, dict[Reuse, Outcome]] = {}
    for name, work in {"chat": conversations, "shared": shared}.items():
        for reuse in SIDES:
            asked = work()
            engine = bare.build(model, slots=args.slots, max_len=args.max_len, prefix_reuse=reuse)
            total = sum(len(chat.said) for chat in asked)
            with report.progress(f"{name}, reuse {reuse}", total) as advance:
                found.setdefault(name, {})[reuse] = drive(engine, asked, advance)
            if name == "chat":
                infinite = best_hits(asked, found[name][reuse])
    costs = {
        reuse: min(
            bookkeeping(reuse, TimedExecutor(args.slots, args.max_len, vocab_size=vocab), strangers())
            for _ in range(5)
        )
        for reuse in SIDES
    }
    engine = bare.build(model, slots=args.slots, max_len=args.max_len)
    with report.progress("strangers", args.requests) as advance:
        plain = drive(engine, strangers(), advance)
    data = _figures(found, costs, plain, infinite)
    _tell(report, data)
    return report.finish(data)


def _figures(
    found: dict[str, dict[Reuse, Outcome]], costs: dict[Reuse, float], plain: Outcome, infinite: float
) -> dict[str, Any]:
    off, on = SIDES
    data: dict[str, Any] = {}
    for name, sides in found.items():
        data[name] = {
            reuse: {
                "tokens_per_s": one.tokens_per_s,
                "rows": one.computed,
                "reused": one.reused,
                **{f"ttft_{key}": value for key, value in percentiles(one.ttfts(name == "chat")).items()},
            }
            for reuse, one in sides.items()
        }
    return data | {
        "different": sum(sides[off].outputs != sides[on].outputs for sides in found.values()),
        "hit_rate": _share(found["chat"][on]),
        "hit_rate_of_an_infinite_cache": infinite,
        "overhead_without_hits": (costs[on] - costs[off]) / plain.seconds,
        "bookkeeping_seconds": costs,
    }


def _share(outcome: Outcome) -> float:
    return outcome.reused / sum(request.prompt_len for chat in outcome.asked for request in chat)


def _tell(report: Report, data: dict[str, Any]) -> None:
    off, on = SIDES
    for name, title in (("chat", "Chats: later turns"), ("shared", "One system prompt, many requests")):
        report.records(
            title,
            [
                {
                    "reuse": reuse,
                    "TTFT p50 (ms)": 1000 * data[name][reuse]["ttft_p50"],
                    "TTFT p95 (ms)": 1000 * data[name][reuse]["ttft_p95"],
                    "tokens/s served": data[name][reuse]["tokens_per_s"],
                    "rows computed": data[name][reuse]["rows"],
                    "tokens reused": data[name][reuse]["reused"],
                }
                for reuse in SIDES
            ],
        )
    report.note(
        f"Of the chats' prompt tokens, {100 * data['hit_rate']:.0f}% were found computed; an infinite cache "
        f"would have had {100 * data['hit_rate_of_an_infinite_cache']:.0f}%."
    )
    with report.chart(columns=2, size=(10, 4.6)) as (_, axes):
        for one, name, key, scale, label in (
            (axes[0], "chat", "ttft_p50", 1000, "TTFT p50 of later turns (ms)"),
            (axes[1], "shared", "tokens_per_s", 1, "tokens/s served, shared prompt"),
        ):
            values = [scale * data[name][reuse][key] for reuse in SIDES]
            bars = one.bar(["every prompt computed", "prefixes reused"], values, color=[STATIC, CONTINUOUS])
            one.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
            one.set_title(label)
            one.margins(y=0.15)
    chat, shared = data["chat"], data["shared"]
    report.at_least(
        "chats: TTFT p50 of later turns, off / on", chat[off]["ttft_p50"] / chat[on]["ttft_p50"], 5, "x"
    )
    report.at_least(
        "shared prompt: tokens/s, on / off", shared[on]["tokens_per_s"] / shared[off]["tokens_per_s"], 3, "x"
    )
    report.at_most("workloads whose answers differ", data["different"], 0)
    report.at_most("bookkeeping without a hit / time of the run", data["overhead_without_hits"], 0.01)
