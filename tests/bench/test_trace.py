"""From a trace or from span files to the slow step, and clear words where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource

from bench import observed
from bench.__main__ import main
from bench.report import BenchError
from bench.trace import steps_of_spans
from engine_actor.chrome_trace import chrome_trace
from engine_actor.clock import wall
from engine_actor.span_export import JsonLinesExporter
from engine_actor.spans import child_context, step_spans
from tests.engine_actor.test_chrome_trace import busy_steps
from tests.observed import RunningEngine, observed_server, offer_load


def test_trace_and_span_files_tell_of_the_same_steps(tmp_path: Path) -> None:
    records = busy_steps()
    exporter = JsonLinesExporter(tmp_path, "engine-0")
    for record in records:
        exporter.export(step_spans(record, child_context(None), "engine-0", "fcfs", Resource({})))
    of_spans = list(steps_of_spans(tmp_path))
    of_trace = observed.steps(chrome_trace({0: records}))
    assert len(of_spans) == len(of_trace) == len(records)
    for record, one, other in zip(records, of_spans, of_trace, strict=True):
        assert one.seconds == pytest.approx(other.seconds, abs=1e-6)
        assert one.seconds == pytest.approx(record.seconds, abs=1e-6)
        assert one.started == pytest.approx(wall(other.started), abs=1e-3)
        rest = {"seconds": 0, "started": 0}
        assert vars(one) | rest == vars(other) | rest
        assert one.prefill_rows + one.decode_rows == record.rows


def test_a_running_server_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with observed_server({"engine-0": RunningEngine("engine-0")}) as server:
        arguments = ["trace", "--out", str(tmp_path), "--url", server.url]
        assert main(arguments) == 2
        assert "nothing has run" in capsys.readouterr().err
        offer_load(server.engines["engine-0"], 5)
        while server.engines["engine-0"].engine.has_work():
            pass
        assert main(arguments) == 0
        assert "The slowest of" in capsys.readouterr().out
        assert (tmp_path / "perfetto.json").stat().st_size > 1000
        assert main([*arguments, "--seconds", "601"]) == 2
        assert "600" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "cannot reach" in capsys.readouterr().err


def test_files_that_are_no_traces_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no span files"):
        list(steps_of_spans(tmp_path))
    (tmp_path / "engine-0.jsonl").write_text('{"resourceSpans": []}\nnonsense\n')
    with pytest.raises(BenchError, match=r"engine-0.jsonl, line 2: not an OTLP trace"):
        list(steps_of_spans(tmp_path))
