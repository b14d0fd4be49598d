"""A long prompt lands among steady decoders: the stall it causes, mode by mode, and what chunking costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from bench import bare
from bench.report import CONTINUOUS, INK, MUTED, STATIC, BenchError, Report
from bench.workload import Shape, Spread, build
from engine_actor.chrome_trace import chrome_trace
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from engine_actor.scheduler import CALM_TOKENS_PER_SLOT, Mode

MODES: tuple[Mode, ...] = ("separate", "batched", "chunked")
BUDGETS = (24, 32, 48, 64, 128, 256, 512)
SWEEP_REPEATS = 3
LEAD = 30
"""Steps of plain decoding before the long prompt arrives."""
NAMES = {
    "separate": "separate: the prompt runs alone, everyone waits",
    "batched": "batched: new prompts together, everyone still waits",
    "chunked": "chunked: a slice of the prompt in every step",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One long prompt among decoders. Seconds; gaps at times since the long prompt arrived."""

    gaps: list[tuple[float, float]]
    """(when a decoder's token came, seconds since its token before), over all decoders."""
    ttft: float
    """Of the long prompt."""
    prefill: float
    """Time in forwards that carried a part of it."""
    records: list[StepRecord]
    guilty: int
    """Number of the longest step that carried a part of it."""

    @property
    def itls(self) -> list[float]:
        return [gap for _, gap in self.gaps]

    @property
    def worst(self) -> float:
        return max(self.itls)

    @property
    def median(self) -> float:
        return median(self.itls)

    @property
    def plain(self) -> float:
        """The median before the long prompt arrived."""
        return median(gap for when, gap in self.gaps if when <= 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bare.add_arguments(parser)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt (default: 2000)")
    parser.add_argument(
        "--decoders", type=int, help="requests already decoding (default: all slots but the prompt's)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="trials per mode; each step's median counts")
    parser.add_argument(
        "--budgets", type=int, nargs="*", default=BUDGETS, help="step budgets of the sweep, in rows"
    )


def run(args: argparse.Namespace) -> int:
    report = Report("spike", args.out)
    decoders = args.slots - 1 if args.decoders is None else args.decoders
    if not 1 <= decoders < args.slots:
        raise BenchError("--decoders must be at least 1 and leave one of the --slots to the long prompt")
    model = bare.load(args.model)
    bare.warm_up(model)

    def trial(mode: Mode, budget: int | None = None) -> Trial:
        engine = bare.build(model, slots=args.slots, max_len=args.max_len, mode=mode, max_step_tokens=budget)
        found = _trial(engine, decoders, args.prompt)
        advance()
        return found

    budgets = [budget for budget in args.budgets if budget > args.slots]
    trials: dict[Mode, Trial] = {}
    worst: dict[Mode, float] = {}
    sweep: dict[int, Trial] = {}
    default = CALM_TOKENS_PER_SLOT * args.slots
    others = [budget for budget in budgets if budget != default]
    total = len(MODES) * args.repeats + len(others) * SWEEP_REPEATS
    with report.progress("long prompts", total) as advance:
        turns = [{mode: trial(mode) for mode in MODES} for _ in range(args.repeats)]
        for mode in MODES:
            trials[mode] = _typical([turn[mode] for turn in turns])
            worst[mode] = max(turn[mode].worst for turn in turns)
        report.save(_figures(trials, worst))
        rounds = [{budget: trial("chunked", budget) for budget in others} for _ in range(SWEEP_REPEATS)]
        for budget in budgets:
            same = [found[budget] for found in rounds if budget in found]
            sweep[budget] = _typical(same) if same else trials["chunked"]

    data = _figures(trials, worst) | {
        "prompt_tokens": args.prompt,
        "decoders": decoders,
        "sweep": [
            {"budget": budget, "itl_worst": t.worst, "itl_median": t.median, "long_ttft": t.ttft}
            for budget, t in sweep.items()
        ],
        "knee": _knee(sweep) if sweep else None,
    }
    for mode, chosen in trials.items():
        mark = f"guilty step: {args.prompt:,} prompt tokens" if mode != "chunked" else "the longest chunk"
        trace = chrome_trace({0: chosen.records}, marks={(0, chosen.guilty): mark})
        path = args.out / f"spike-{mode}.trace.json"
        path.write_text(json.dumps(trace))
        report.say(f"wrote {path} (opens in ui.perfetto.dev; step {chosen.guilty} is marked)")
    _draw(report, trials, args.prompt, args.repeats)
    if sweep:
        _draw_sweep(report, sweep, data["knee"])

    worst_itl = f"worst ITL (median of {args.repeats} trials)"
    report.table(
        f"{decoders} decoders, then a prompt of {args.prompt:,} tokens",
        [
            "mode",
            "plain ITL (ms)",
            "ITL p50 (ms)",
            f"{worst_itl} (ms)",
            "worst of all trials (ms)",
            "worst / p50",
            "worst / plain",
            "long prompt's TTFT (s)",
        ],
        [
            [
                mode,
                *(1000 * seconds for seconds in (t.plain, t.median, t.worst, worst[mode])),
                t.worst / t.median,
                t.worst / t.plain,
                t.ttft,
            ]
            for mode, t in trials.items()
        ],
    )
    if sweep:
        report.table(
            "chunked: the budget of a step against the stall it allows",
            ["rows a step", "worst ITL (median of trials) (ms)", "worst / p50", "long prompt's TTFT (s)", ""],
            [
                [b, 1000 * t.worst, t.worst / t.median, t.ttft, "knee" if b == data["knee"] else ""]
                for b, t in sweep.items()
            ],
        )
    chunked, separate = trials["chunked"], trials["separate"]
    report.note(
        "What to see: without chunks, every user's answer freezes for the whole prefill of a stranger's "
        f"prompt; with chunks, the longest pause is {chunked.worst / chunked.plain:.1f} times a plain step, "
        f"and the stranger waits {chunked.ttft - separate.ttft:+.2f} s for the first token."
    )
    report.note(
        f"The worst ITL is that of the worst step, each step the median of what it took in {args.repeats} "
        "trials. Plain: the median before the prompt arrives; p50: of all steps, those with a chunk included."
    )
    report.at_most(f"chunked: {worst_itl} / median ITL", chunked.worst / chunked.median, 2.0, "x")
    report.at_least(
        f"separate: {worst_itl} / the long prompt's prefill", separate.worst / separate.prefill, 1.0
    )
    return report.finish(data)


def _trial(engine: Engine, decoders: int, prompt: int) -> Trial:
    """Decode steadily, add the long prompt, and go on until plain steps are again the majority."""
    room, vocab = engine.slots.max_len, engine.executor.vocab_size
    users = build(Shape(decoders, Spread(32, 0, 32), Spread(room - 32, 0, room)), "users", vocab=vocab)
    long = build(Shape(1, Spread(prompt, 0, prompt), Spread(8, 0, 8)), "long", vocab=vocab).items[0]
    for item in users.items:
        engine.submit(item.request(engine.clock()))

    times: dict[str, list[float]] = {item.id: [] for item in users.items}
    records: list[StepRecord] = []

    def step_until(done: Callable[[], bool]) -> None:
        while not done():
            outputs, record = engine.step()
            now = engine.clock()
            records.append(record)
            for output in outputs:
                times.setdefault(output.request_id, []).append(now)

    step_until(lambda: min(map(len, times.values())) > LEAD)
    before = len(records)
    request = long.request()
    request.id, request.arrival = "long", engine.clock()
    engine.submit(request)
    step_until(lambda: "long" in times)
    guilty = records[before:]
    step_until(lambda: len(records) >= before + 2 * len(guilty) + LEAD)
    return Trial(
        gaps=[
            (after - request.arrival, after - earlier)
            for name, tokens in times.items()
            if name != "long"
            for earlier, after in pairwise(tokens)
        ],
        ttft=times["long"][0] - request.arrival,
        prefill=sum(_forward_seconds(record) for record in guilty),
        records=records,
        guilty=max(guilty, key=lambda record: record.seconds).number,
    )


def _typical(trials: Sequence[Trial]) -> Trial:
    """Trials take the same steps, so each gap is the median of what it was in them.

    What stalls one trial and no other is the machine's doing. The records are those of the calmest trial.
    """
    chosen = min(trials, key=lambda t: t.worst)
    same = zip(*(trial.gaps for trial in trials), strict=True)
    return Trial(
        gaps=[(median(when for when, _ in gaps), median(gap for _, gap in gaps)) for gaps in same],
        ttft=median(t.ttft for t in trials),
        prefill=median(t.prefill for t in trials),
        records=chosen.records,
        guilty=chosen.guilty,
    )


def _forward_seconds(record: StepRecord) -> float:
    forwards = [i for i in record.intervals if i.phase in ("prefill", "decode")]
    return sum(forwards[span.forward].seconds for span in record.shares if span.request_id == "long")


def _figures(trials: dict[Mode, Trial], worst: dict[Mode, float]) -> dict[str, Any]:
    return {
        mode: {
            "itl_plain": t.plain,
            "itl_median": t.median,
            "itl_worst": t.worst,
            "itl_worst_of_all_trials": worst[mode],
            "long_ttft": t.ttft,
            "long_prefill": t.prefill,
            "guilty_step": t.guilty,
        }
        for mode, t in trials.items()
    }


def _knee(sweep: dict[int, Trial]) -> int:
    """The budget farthest from the straight line between the sweep's ends: beyond it, stall grows
    faster than the long prompt's TTFT falls. Both axes scaled to [0, 1] (Satopää et al., 2011)."""
    stall = _unit([t.worst for t in sweep.values()])
    wait = _unit([t.ttft for t in sweep.values()])
    return list(sweep)[int(np.argmin(stall + wait))]


def _unit(values: Sequence[float]) -> Any:  # noqa: ANN401 - an array
    low, high = min(values), max(values)
    return (np.array(values) - low) / ((high - low) or 1.0)


def _draw(report: Report, trials: dict[Mode, Trial], prompt: int, repeats: int) -> None:
    with report.chart(rows=len(trials), size=(10, 8)) as (figure, panels):
        bottom = 800 * min(t.median for t in trials.values())
        top = 2500 * max(t.worst for t in trials.values())
        low = min(when for t in trials.values() for when, _ in t.gaps)
        high = max(when for t in trials.values() for when, _ in t.gaps)
        for axes, (mode, t) in zip(panels, trials.items(), strict=True):
            colour = CONTINUOUS if mode == "chunked" else STATIC
            when, gaps = zip(*t.gaps, strict=True)
            axes.scatter(when, 1000 * np.array(gaps), s=9, color=colour, alpha=0.55, linewidths=0)
            axes.axvline(0, color=MUTED, linewidth=1, linestyle=":")
            axes.axvspan(0, t.ttft, color=colour, alpha=0.08, linewidth=0)
            axes.set(yscale="log", ylim=(bottom, top), ylabel="ms between\ntokens")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.set_title(NAMES[mode])
            at = max(t.gaps, key=lambda gap: gap[1])
            late = at[0] > (low + high) / 2
            axes.annotate(
                f"worst {1000 * t.worst:,.0f} ms (median of {repeats} trials) "
                f"= {t.worst / t.median:.1f} x median ITL",
                (at[0], 1000 * at[1]),
                xytext=(-10 if late else 10, 8),
                textcoords="offset points",
                ha="right" if late else "left",
                color=INK,
            )
        panels[0].annotate(
            f" a prompt of {prompt:,} tokens arrives", (0, (bottom * top) ** 0.5), color=MUTED, va="center"
        )
        for axes in panels:
            axes.set_xlim(low, high)
        panels[-1].set_xlabel("seconds since the long prompt arrived (shaded: until its first token)")
        figure.align_ylabels(panels)


def _draw_sweep(report: Report, sweep: dict[int, Trial], knee: int) -> None:
    with report.chart("budget", rows=2, size=(10, 7)) as (_, (stall, wait)):
        budgets = list(sweep)
        stall.plot(budgets, [t.worst / t.median for t in sweep.values()], "o-", color=CONTINUOUS)
        stall.axhline(2, color=STATIC, linewidth=1.5, linestyle="--")
        stall.annotate("2 x median: the bar", (budgets[-1], 2), ha="right", va="bottom", color=STATIC)
        stall.set_ylabel("worst ITL (median of\ntrials) / median ITL")
        stall.set_title("A larger step budget stalls the others for longer ...")
        wait.plot(budgets, [t.ttft for t in sweep.values()], "o-", color=CONTINUOUS)
        wait.set_ylabel("long prompt's\nTTFT (s)")
        wait.set_title("... and brings the long prompt's first token sooner")
        wait.set_xlabel("rows in a step (decodes first, the rest is prompt)")
        for axes in (stall, wait):
            axes.set_xscale("log", base=2)
            axes.set_xticks(budgets, [str(b) for b in budgets])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.axvline(knee, color=MUTED, linewidth=1.5, linestyle=":")
        wait.annotate(f" knee: {knee}", (knee, 0), xytext=(2, 8), textcoords="offset points", color=MUTED)
