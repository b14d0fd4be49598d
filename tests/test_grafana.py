"""The Grafana dashboard asks only for what the engine tells."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from unittest.mock import AsyncMock

from app.refusals import Refusals
from engine_actor.metrics import EngineMetrics
from tests.engine_actor.watched import INFO, request, tight_engine, watched

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana-dashboard.json"


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    with watched(tight_engine()) as subject:
        # A series exists from its first event on: these are preempted, finished, and aborted.
        subject.run([request(f"r{i}", 9, 16) for i in range(3)])
        aborted = request("aborted", 3, 3)
        subject.submit(aborted)
        subject.abort(aborted)
        refusals = Refusals(AsyncMock(add_refusals=AsyncMock(return_value={(429, "queue_full"): 1})))
        families = [*subject.telemetry.figures(), *asyncio.run(refusals.families())]
        samples = [sample for family in families for sample in family.samples]
    names = {sample.name for sample in samples}
    labels_of = {name: {key for s in samples if s.name == name for key in s.labels} for name in names}

    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        asked = set(re.findall(r"\bslotserve_\w+", query))
        assert asked, query
        assert asked <= names, f"{query}: {asked - names} do not exist"
        grouped = {label for group in re.findall(r"by \(([\w, ]+)\)", query) for label in group.split(", ")}
        legend_free = grouped | set(re.findall(r"(\w+)=~", query))
        for name in asked:
            assert legend_free <= labels_of[name], (
                f"{query}: {name} has no label {legend_free - labels_of[name]}"
            )


def test_every_metric_but_its_plumbing_is_on_the_dashboard() -> None:
    text = DASHBOARD.read_text()
    families = {family.name for family in EngineMetrics("engine-0", INFO).families()}
    families.add("slotserve_http_refusals")
    assert {name for name in families if name not in text} <= {
        "slotserve_spans_exported",
        "slotserve_slots_free",
    }
