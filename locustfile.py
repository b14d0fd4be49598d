"""Locust users who stream completions: `make load`, or `locust -f locustfile.py` for the web page.

TTFT, time between tokens (ITL), and end-to-end time (E2E) and output tokens/s of complete answers are
statistics of their own, with percentiles; the completions row holds refused, failed and cancelled ones
too. `--shape` chooses how load arrives: `steady` keeps all users busy, `burst` lets most of them come
and go together, `replay` sends each request of `--preset` or `--trace` when it is due. All times count
from when a request was due, a busy user's delay included.

The key that users send is `--api-key` or SLOTSERVE_API_KEY; SLOTSERVE_API_KEYS, all keys that a server
knows, is the server's.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import gevent
import requests
from locust import HttpUser, LoadTestShape, events, stats, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser

from bench import workload
from bench.client import CONNECT_TIMEOUT, SILENCE_TIMEOUT, Endpoint
from bench.replay import from_trace
from bench.report import BenchError
from bench.stream import CompletionStream
from bench.workload import Item, Workload

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)

Name = TypeVar("Name", str, int)
BURST_PERIOD, BURST_LENGTH = 20.0, 8.0
stats.PERCENTILES_TO_STATISTICS = [0.5, 0.95, 0.99]


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--shape", choices=("steady", "burst", "replay"), default="steady")
    parser.add_argument("--preset", default="default", help=f"one of {', '.join(workload.PRESETS)}")
    parser.add_argument("--trace", default="", help="a CSV in the Azure layout, instead of a preset")
    parser.add_argument("--time-scale", type=float, default=1.0, help="stretch the trace's time by this")
    parser.add_argument("--context", type=int, default=2048, help="tokens a request may have; scales a trace")
    parser.add_argument("--requests", type=int, default=0, help="stop after so many (0: go on)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tenants", default="", help="shares by tenant: a=3,b=1")
    parser.add_argument("--priorities", default="", help="shares by priority: 0=9,-1=1")
    parser.add_argument("--cancel", type=float, default=0.0, help="share of answers hung up on midway")
    parser.add_argument(
        "--api-key",
        default="",
        env_var="SLOTSERVE_API_KEY",
        is_secret=True,
        help="the key to send, for a server with keys; not SLOTSERVE_API_KEYS, which is the server's own",
    )


@dataclass(frozen=True, slots=True)
class Errand:
    """A request, and what its user makes of it."""

    item: Item
    due: float
    """Seconds since the epoch."""
    patience: int
    """Output tokens after which the user hangs up; all of them: never."""


class Source:
    """Hands the workload's requests to whichever user is free, and knows when all are done.

    Users hang up on a share `cancel` of the answers, and `seed` decides on which and where.
    """

    def __init__(self, load: Workload, *, replay: bool, limit: int, cancel: float, seed: int) -> None:
        items = load.items if replay else itertools.cycle(load.items)
        self._items: Iterator[Item] = itertools.islice(items, limit or None)
        self._replay = replay
        self._cancel = cancel
        self._rng = random.Random(seed)
        self._started = time.time()
        self._open = 0
        self._drained = False

    @property
    def finished(self) -> bool:
        return self._drained and self._open == 0

    def take(self) -> Errand:
        """The next request. Raises StopUser when none is left."""
        item = next(self._items, None)
        if item is None:
            self._drained = True
            raise StopUser
        self._open += 1
        hangs_up = self._rng.random() < self._cancel
        patience = self._rng.randrange(item.output_tokens) if hangs_up else item.output_tokens
        return Errand(item, self._started + item.arrival if self._replay else time.time(), patience)

    def give_back(self) -> None:
        """The request taken before has ended, one way or another."""
        self._open -= 1


class Streamer(HttpUser):
    """Streams one completion after another."""

    source: ClassVar[Source | None] = None
    """Of the run that is on, if one is."""
    model: ClassVar[str]
    server: ClassVar[Endpoint]

    @task
    def complete(self) -> None:
        """One request of the workload, from when it is due to its last token."""
        source = self.source
        if source is None:
            raise StopUser
        errand = source.take()
        try:
            gevent.sleep(max(0.0, errand.due - time.time()))
            stream = self._stream(errand)
        finally:
            source.give_back()
        if stream.error:
            gevent.sleep(1.0)

    def _stream(self, errand: Errand) -> CompletionStream:
        stream, item = CompletionStream(), errand.item
        with self.client.post(
            "/v1/completions",
            json=item.body(self.model),
            headers=self.server.headers(item.tenant),
            stream=True,
            timeout=(CONNECT_TIMEOUT, SILENCE_TIMEOUT),
            catch_response=True,
        ) as response:
            if response.status_code == 200:
                patient = self._read(response, stream, errand)
            else:
                patient, stream.error = True, _refusal(response)
            seconds = time.time() - errand.due
            response.request_meta["response_time"] = 1000 * seconds
            response.request_meta["response_length"] = len(stream.token_times)
            if not patient:
                self._record("cancelled", 1000 * seconds)
            elif stream.error is None:
                stream.end(item.output_tokens)
            if stream.error:
                response.failure(stream.error)
            elif patient:
                self._record("E2E", 1000 * seconds)
                self._record("output tokens/s", item.output_tokens / seconds, item.output_tokens)
        return stream

    def _read(self, response: requests.Response, stream: CompletionStream, errand: Errand) -> bool:
        """Take the answer in. False: the user ran out of patience and hung up."""
        last = errand.due
        try:
            for line in response.iter_lines():
                first, now = len(stream.token_times), time.time()
                stream.feed(line.decode(errors="replace"), now)
                for index in range(first, len(stream.token_times)):
                    self._record("ITL" if index else "TTFT", 1000 * (now - last))
                    last = now
                if len(stream.token_times) > errand.patience:
                    response.close()
                    return False
                if stream.done or stream.error:
                    break
        except requests.RequestException as error:
            stream.error = f"the stream broke off ({type(error).__name__})"
        return True

    def _record(self, name: str, value: float, tokens: int = 0) -> None:
        """A statistic of its own; Locust takes `value` for milliseconds, the name says where it is not."""
        self.environment.events.request.fire(
            request_type="stream",
            name=name,
            response_time=value,
            response_length=tokens,
            exception=None,
            context={},
        )


class Load(LoadTestShape):
    """`--shape` by name; ends after `--run-time` or when the last request is done."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """How many users there should be now; None ends the run."""
        assert self.runner is not None
        options = _parsed(self.runner.environment)
        elapsed = time.perf_counter() - self.start_time
        finished = Streamer.source is not None and Streamer.source.finished
        if finished or (options.run_time and elapsed > options.run_time):
            return None
        users, rate = options.num_users or 1, options.spawn_rate or 1
        if options.shape == "burst" and elapsed % BURST_PERIOD >= BURST_LENGTH:
            users = max(1, users // 4)
        return users, rate


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _start(environment: Environment, **_: object) -> None:
    options = _parsed(environment)
    Streamer.server = Endpoint(environment.host or "", options.api_key or None)
    try:
        Streamer.model = Streamer.server.model()
        Streamer.source = Source(
            _load(options),
            replay=options.shape == "replay",
            limit=options.requests,
            cancel=options.cancel,
            seed=options.seed,
        )
    except BenchError as error:
        log.error("%s", error)
        environment.process_exit_code = 2
        assert environment.runner is not None
        environment.runner.quit()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def _stop(**_: object) -> None:
    Streamer.source = None


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _summarize(environment: Environment, **_: object) -> None:
    entries = environment.stats.entries
    answers = entries.get(("/v1/completions", "POST"))
    if answers is None:
        return
    complete, cancelled = (entries.get((name, "stream")) for name in ("output tokens/s", "cancelled"))
    print(
        f"\n{complete.num_requests if complete else 0} answers complete, "
        f"{cancelled.num_requests if cancelled else 0} cancelled, {answers.num_failures} failed"
    )
    if complete and complete.last_request_timestamp:
        seconds = complete.last_request_timestamp - environment.stats.start_time
        print(f"{complete.total_content_length / seconds:.1f} output tokens/s in all")
    for name in ("TTFT", "ITL", "E2E"):
        if entry := entries.get((name, "stream")):
            p50, p95, p99 = (entry.get_response_time_percentile(p) for p in (0.5, 0.95, 0.99))
            print(f"{name:>4}: p50 {p50} ms, p95 {p95} ms, p99 {p99} ms")


def _parsed(environment: Environment) -> Namespace:
    options = environment.parsed_options
    assert isinstance(options, Namespace)
    return options


def _load(options: Namespace) -> Workload:
    if options.trace:
        load = from_trace(
            Path(options.trace), max_len=options.context, time_scale=options.time_scale, seed=options.seed
        )
    else:
        load = workload.preset(options.preset, seed=options.seed)
    tenants = _shares("--tenants", options.tenants, str) or {"default": 1.0}
    priorities = _shares("--priorities", options.priorities, int)
    return load.among(tenants, priorities, seed=options.seed)


def _shares(option: str, text: str, kind: Callable[[str], Name]) -> dict[Name, float]:
    """`a=3,b=1` as {"a": 3.0, "b": 1.0}. Raises BenchError."""
    try:
        parts = [part.split("=") for part in text.split(",") if part]
        return {kind(name): float(share) for name, share in parts}
    except ValueError:
        raise BenchError(f"{option}: expected name=share,..., got {text!r}") from None


def _refusal(response: requests.Response) -> str:
    return f"HTTP {response.status_code}: {response.text[:200]}" if response.status_code else "no answer"
