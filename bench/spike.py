"""A long prompt lands among steady decoders: the stall it causes, mode by mode, and what chunking costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np

from bench import bare, chart, options
from bench.chart import CONTINUOUS, INK, MUTED, STATIC
from bench.lengths import fixed
from bench.report import BenchError, Report
from bench.samples import in_turns
from bench.workload import Shape, build
from engine_actor.chrome_trace import chrome_trace
from engine_actor.engine import Engine
from engine_actor.records import StepRecord
from engine_actor.scheduler import CALM_TOKENS_PER_SLOT, Mode

NAMES: dict[Mode, str] = {
    "separate": "separate: the prompt runs alone, everyone waits",
    "batched": "batched: new prompts together, everyone still waits",
    "chunked": "chunked: a slice of the prompt in every step",
}
BUDGETS = (24, 32, 48, 64, 128, 256, 512)
SWEEP_REPEATS = 3
LEAD = 30
"""Steps of plain decoding before the long prompt arrives."""
BAR = 2.0


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
    def worst(self) -> float:
        return max(gap for _, gap in self.gaps)

    @property
    def median(self) -> float:
        return median(gap for _, gap in self.gaps)

    @property
    def plain(self) -> float:
        """The median before the long prompt arrived."""
        return median(gap for when, gap in self.gaps if when <= 0)

    @property
    def figures(self) -> dict[str, float]:
        itl = {"itl_plain": self.plain, "itl_median": self.median, "itl_worst": self.worst}
        long = {"long_ttft": self.ttft, "long_prefill": self.prefill, "guilty_step": self.guilty}
        ratios = {"worst_by_median": self.worst / self.median, "worst_by_plain": self.worst / self.plain}
        return itl | long | ratios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt (default: 2000)")
    decoders = "requests already decoding (default: all slots but the prompt's)"
    parser.add_argument("--decoders", type=int, help=decoders)
    parser.add_argument("--repeats", type=int, default=5, help="trials per mode; each step's median counts")
    budgets = "step budgets of the sweep, in rows"
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS, help=budgets)


def run(args: argparse.Namespace) -> int:
    report = Report("spike", args.out)
    decoders = args.slots - 1 if args.decoders is None else args.decoders
    if not 1 <= decoders < args.slots:
        raise BenchError("--decoders must be at least 1 and leave one of the --slots to the long prompt")
    model = bare.load(args.model)

    def trial(mode: Mode, budget: int | None) -> Trial:
        engine = bare.build(model, slots=args.slots, max_len=args.max_len, mode=mode, max_step_tokens=budget)
        found = _trial(engine, decoders, args.prompt)
        advance()
        return found

    budgets = [budget for budget in args.budgets if budget > args.slots]
    others = [budget for budget in budgets if budget != CALM_TOKENS_PER_SLOT * args.slots]
    total = len(NAMES) * args.repeats + len(others) * SWEEP_REPEATS
    with report.progress("long prompts", total) as advance:
        turns = in_turns({str(mode): partial(trial, mode, None) for mode in NAMES}, args.repeats)
        trials = {mode: _typical(found) for mode, found in turns.items()}
        sweeps = in_turns({str(rows): partial(trial, "chunked", rows) for rows in others}, SWEEP_REPEATS)
    found = {int(rows): _typical(trials) for rows, trials in sweeps.items()}
    sweep = {budget: found.get(budget, trials["chunked"]) for budget in budgets}

    knee = _knee(sweep) if sweep else None
    data = {
        mode: t.figures | {"itl_worst_of_all_trials": max(s.worst for s in turns[mode])}
        for mode, t in trials.items()
    }
    for mode, chosen in trials.items():
        mark = f"guilty step: {args.prompt:,} prompt tokens" if mode != "chunked" else "the longest chunk"
        path = args.out / f"spike-{mode}.trace.json"
        trace = chrome_trace({0: chosen.records}, marks={(0, chosen.guilty): mark})
        path.write_text(json.dumps(trace))
        report.say(f"wrote {path} (opens in ui.perfetto.dev; step {chosen.guilty} is marked)")
    _draw(report, trials, f"a prompt of {args.prompt:,} tokens arrives", f"median of {args.repeats} trials")
    worst_itl = f"worst ITL (median of {args.repeats} trials)"
    report.records(
        f"{decoders} decoders, then a prompt of {args.prompt:,} tokens; seconds",
        [{"mode": mode, **figures} for mode, figures in data.items()],
        f"mode | plain ITL: itl_plain | ITL p50: itl_median | {worst_itl}: itl_worst | "
        "worst of all trials: itl_worst_of_all_trials | worst / p50: worst_by_median | "
        "worst / plain: worst_by_plain | long prompt's TTFT: long_ttft",
    )
    if knee is not None:
        _sweep(report, sweep, knee)
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
    report.at_most(f"chunked: {worst_itl} / median ITL", chunked.worst / chunked.median, BAR, "x")
    prefill = f"separate: {worst_itl} / the long prompt's prefill"
    report.at_least(prefill, separate.worst / separate.prefill, 1.0)
    swept = [{"budget": budget, **t.figures} for budget, t in sweep.items()]
    counts = {"prompt_tokens": args.prompt, "decoders": decoders}
    return report.finish({**data, **counts, "sweep": swept, "knee": knee})


def _trial(engine: Engine, decoders: int, prompt: int) -> Trial:
    """Decode steadily, add the long prompt, and go on until plain steps are again the majority."""
    room, vocab = engine.slots.max_len, engine.executor.vocab_size
    users = build(Shape(decoders, fixed(32), fixed(room - 32)), "users", vocab=vocab)
    long = build(Shape(1, fixed(prompt), fixed(8)), "long", seed=1, vocab=vocab).items[0]
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
    first, *_ = times.pop("long")
    return Trial(
        [(b - request.arrival, b - a) for tokens in times.values() for a, b in pairwise(tokens)],
        ttft=first - request.arrival,
        prefill=sum(_forward_seconds(record) for record in guilty),
        records=records,
        guilty=max(guilty, key=lambda record: record.seconds).number,
    )


def _forward_seconds(record: StepRecord) -> float:
    forwards = [i for i in record.intervals if i.phase in ("prefill", "decode")]
    return sum(forwards[share.forward].seconds for share in record.shares if share.request_id == "long")


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


def _knee(sweep: Mapping[int, Trial]) -> int:
    """The budget farthest from the straight line between the sweep's ends: beyond it, stall grows
    faster than the long prompt's TTFT falls. Both axes scaled to [0, 1] (Satopää et al., 2011)."""
    axes = np.array([[t.worst, t.ttft] for t in sweep.values()])
    span = np.ptp(axes, axis=0)
    scaled = (axes - axes.min(axis=0)) / np.where(span > 0, span, 1)
    return list(sweep)[int(np.argmin(scaled.sum(axis=1)))]


def _sweep(report: Report, sweep: Mapping[int, Trial], knee: int) -> None:
    report.records(
        "chunked: the budget of a step against the stall it allows; seconds",
        [{"budget": b, "knee": "knee" if b == knee else "", **t.figures} for b, t in sweep.items()],
        "rows a step: budget | worst ITL (median of trials): itl_worst | worst / p50: worst_by_median | "
        "long prompt's TTFT: long_ttft | knee",
    )
    with report.chart("budget", rows=2, size=(10, 7)) as (_, (stall, wait)):
        stall.plot(list(sweep), [t.worst / t.median for t in sweep.values()], "o-")
        stall.axhline(BAR, color=STATIC, linewidth=1.5, linestyle="--")
        stall.annotate(f"{BAR:g} x median: the bar", (max(sweep), BAR), ha="right", va="bottom", color=STATIC)
        stall.set_ylabel("worst ITL (median of\ntrials) / median ITL")
        stall.set_title("A larger step budget stalls the others for longer ...")
        wait.plot(list(sweep), [t.ttft for t in sweep.values()], "o-")
        wait.set_ylabel("long prompt's\nTTFT (s)")
        wait.set_title("... and brings the long prompt's first token sooner")
        wait.set_xlabel("rows in a step (decodes first, the rest is prompt)")
        wait.annotate(f" knee: {knee}", (knee, 0), xytext=(2, 8), textcoords="offset points", color=MUTED)
        for axes in (stall, wait):
            chart.doublings(axes, list(sweep))
            axes.set_ylim(bottom=0)
            axes.axvline(knee, color=MUTED, linewidth=1.5, linestyle=":")


def _draw(report: Report, trials: Mapping[str, Trial], event: str, trials_told: str) -> None:
    with report.chart(rows=len(trials), size=(10, 8)) as (figure, panels):
        bottom = 800 * min(t.median for t in trials.values())
        top = 2500 * max(t.worst for t in trials.values())
        names: Mapping[str, str] = {str(mode): name for mode, name in NAMES.items()}
        when = [when for t in trials.values() for when, _ in t.gaps]
        for axes, (mode, t) in zip(panels, trials.items(), strict=True):
            colour = CONTINUOUS if mode == "chunked" else STATIC
            at, gaps = np.array(t.gaps).T
            axes.scatter(at, 1000 * gaps, s=9, color=colour, alpha=0.55, linewidths=0)
            axes.axvline(0, color=MUTED, linewidth=1, linestyle=":")
            axes.axvspan(0, t.ttft, color=colour, alpha=0.08, linewidth=0)
            axes.set(yscale="log", ylim=(bottom, top), ylabel="ms between\ntokens", title=names[mode])
            axes.set_xlim(min(when), max(when))
            axes.yaxis.set_major_formatter("{x:,.0f}")
            worst = f"worst {1000 * t.worst:,.0f} ms ({trials_told}) = {t.worst / t.median:.1f} x median ITL"
            right = {"xycoords": "axes fraction", "ha": "right", "va": "top"}
            axes.annotate(worst, (0.99, 0.96), color=INK, **right)
        panels[0].annotate(f" {event}", (0, (bottom * top) ** 0.5), color=MUTED, va="center")
        panels[-1].set_xlabel("seconds since the long prompt arrived (shaded: until its first token)")
        figure.align_ylabels(panels)
