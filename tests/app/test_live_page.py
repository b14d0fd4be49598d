"""The live page in a real browser, on the toy engine: what a person sees, and every way to steer it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Literal

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from app.api_error import ApiError
from bench.chromium import Page, chromium_missing, open_page
from tests.observed import ObservedServer, RunningEngine, observed_server, offer_load
from tests.page import click_newest_cell, problems

pytestmark = pytest.mark.skipif(bool(chromium_missing()), reason=chromium_missing() or "-")

STEP = 0.02


@pytest.fixture
def server() -> Iterator[ObservedServer]:
    with observed_server({"engine-0": RunningEngine("engine-0", step_seconds=STEP)}) as server:
        yield server


def test_requests_appear_and_end_and_one_can_be_opened(server: ObservedServer) -> None:
    engine = server.engines["engine-0"]
    with open_page(server.url) as page:
        page.wait(lambda: "toy" in page.text("facts"), "the header")
        assert {"mode chunked", "policy fcfs", "16 slots"} <= set(page.text("facts").split("\n"))
        page.wait(lambda: "idle" in page.text("empty"), "the empty grid")
        assert page.painted() == 0

        engine.submit("chatcmpl-long", 60, 150, "atlas")
        engine.submit("chatcmpl-short", 5, 10, "borealis")
        page.wait(lambda: page.painted() > 500, "cells")
        page.wait(lambda: "served" in page.text("sentence"), "the sentence")
        click_newest_cell(page, 0)
        page.wait(lambda: "now in decode" in page.text("request"), "the request's state")
        assert "chatcmpl-long of tenant atlas" in page.text("request")
        page.wait(lambda: "finished" in page.text("request"), "the request's end", 20)
        assert "for 60 prompt tokens" in page.text("request")
        assert "for 150 tokens" in page.text("request")

        engine.submit("chatcmpl-again", 60, 150, "atlas")

        def opened() -> bool:
            # Slot 0 remembers more than it shares, so that the prompt is copied to the next free one.
            click_newest_cell(page, 1)
            return "chatcmpl-again" in page.text("request")

        page.wait(opened, "the one that reuses")
        page.wait(lambda: "for 60 prompt tokens, 59 found computed" in page.text("request"), "what it reused")
        assert "free, and remembers" in page.text("legend")
        assert problems(page) == []


def test_pause_and_scrub_show_the_past_while_the_engine_goes_on(server: ObservedServer) -> None:
    engine = server.engines["engine-0"]
    engine.submit("chatcmpl-a", 5, 400)
    with open_page(server.url) as page:
        page.wait(lambda: engine.engine.steps > 60 and page.painted() > 500, "sixty steps", 30)
        page.driver.find_element(By.ID, "play").click()
        page.wait(lambda: page.text("play") == "Back to live", "pause")
        page.driver.execute_script(
            "const s = document.getElementById('scrub'); s.value = 20; s.dispatchEvent(new Event('input'));"
        )
        page.wait(lambda: page.text("sentence").startswith("Step 20 "), "the past")
        assert "back" in page.text("when")
        before = engine.engine.steps
        page.wait(lambda: engine.engine.steps > before + 20, "more steps")
        assert page.text("sentence").startswith("Step 20 ")
        page.driver.find_element(By.ID, "play").click()
        page.wait(lambda: page.text("when") == "live", "live again")
        page.wait(lambda: not page.text("sentence").startswith("Step 20 "), "the present")
        assert problems(page) == []


def test_everything_works_from_the_keyboard(server: ObservedServer) -> None:
    server.engines["engine-0"].submit("chatcmpl-key", 5, 60)
    with open_page(server.url) as page:
        page.wait(lambda: page.painted() > 500, "cells")
        body = page.driver.find_element(By.TAG_NAME, "body")
        body.send_keys(" ")
        page.wait(lambda: page.text("play") == "Back to live", "pause by space")
        body.send_keys(" ")
        page.wait(lambda: page.text("play") == "Pause", "live by space")
        grid = page.driver.find_element(By.ID, "grid")
        grid.send_keys(Keys.ARROW_LEFT)
        grid.send_keys(Keys.ARROW_LEFT)
        page.wait(lambda: "slot 0: chatcmpl-key of default" in page.text("spoken"), "the spoken cell")
        grid.send_keys(Keys.ARROW_DOWN)
        page.wait(lambda: "slot 1: nobody" in page.text("spoken"), "the spoken free slot")
        grid.send_keys(Keys.ARROW_UP)
        grid.send_keys(Keys.ENTER)
        page.wait(lambda: "chatcmpl-key of tenant default" in page.text("request"), "the request by Enter")
        grid.send_keys(Keys.ESCAPE)
        page.wait(lambda: "Click a bar" in page.text("request"), "nothing selected by Escape")
        assert grid.get_attribute("aria-label").startswith("The batch, 16 slots. Step ")
        page.driver.find_element(By.CSS_SELECTOR, "summary").send_keys(Keys.ENTER)
        page.wait(lambda: page.text("steps").count("\n") >= 5, "the table")


def test_the_page_asks_for_the_key_and_keeps_it() -> None:
    def authorize(headers: Mapping[str, str]) -> None:
        if headers.get("authorization") != "Bearer secret":
            raise ApiError(401, "Wrong key.")

    with (
        observed_server({"engine-0": RunningEngine("engine-0")}, authorize) as server,
        open_page(server.url) as page,
    ):
        for attempt, key in enumerate(("wrong", "secret")):
            page.wait(lambda: page.driver.find_element(By.ID, "key").is_displayed(), f"dialog {attempt}")
            page.driver.find_element(By.ID, "key").send_keys(key + Keys.ENTER)
        page.wait(lambda: "toy" in page.text("facts"), "the page after the right key")
        page.driver.refresh()
        page.wait(lambda: "toy" in page.text("facts"), "the page without asking again")


def test_the_page_waits_for_an_engine_where_none_is_up() -> None:
    with observed_server({}) as server, open_page(server.url) as page:
        page.wait(lambda: page.text("facts") == "toy", "the header without an engine")
        page.driver.find_element(By.ID, "play").click()
        page.driver.find_element(By.TAG_NAME, "body").send_keys(" ")
        assert page.text("notice") == ""
        assert problems(page) == []


def test_why_there_is_no_trace_stays_on_the_page(server: ObservedServer) -> None:
    with open_page(server.url) as page:
        page.wait(lambda: "toy" in page.text("facts"), "the header")
        page.driver.execute_script(
            """const real = window.fetch;
            window.fetch = (url, options) => String(url).startsWith("trace")
              ? Promise.resolve(Response.json({ error: { message: "too many traces" } }, { status: 429 }))
              : real(url, options);"""
        )
        page.driver.find_element(By.ID, "trace").click()
        page.wait(lambda: page.text("notice") == "too many traces", "the notice")
        server.engines["engine-0"].submit("chatcmpl-next", 5, 20)
        page.wait(lambda: page.painted() > 500, "lines that came since")
        assert page.text("notice") == "too many traces"


def test_two_engines_can_be_chosen() -> None:
    engines = {name: RunningEngine(name, step_seconds=STEP) for name in ("engine-0", "engine-1")}
    with observed_server(engines) as server, open_page(server.url) as page:
        engines["engine-1"].submit("chatcmpl-there", 5, 100)
        page.wait(lambda: "engine-1" in page.text("engine"), "the selector")
        assert page.painted() == 0
        page.driver.find_element(By.CSS_SELECTOR, "#engine option[value=engine-1]").click()
        page.wait(lambda: page.painted() > 500, "cells of the other engine")


def selects_some_slot(page: Page) -> bool:
    for slot in range(16):
        click_newest_cell(page, slot)
        time.sleep(0.05)
        if "tenant" in page.text("request"):
            return True
    return False


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_is_pictured(server: ObservedServer, theme: Literal["light", "dark"], width: int) -> None:
    engine = server.engines["engine-0"]
    offer_load(engine, 60)
    with open_page(server.url, width=width, height=1100 if width > 600 else 1700, theme=theme) as page:
        page.wait(lambda: engine.engine.steps > 140, "a full grid", 30)
        page.wait(lambda: page.painted() > 5000, "cells")
        page.wait(lambda: selects_some_slot(page), "a request")
        page.screenshot(f"live-page-{width}-{theme}")
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
        background = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(11, 15, 23)") == (theme == "dark")
        assert problems(page) == []
        if page.text("queue") != "Nobody waits.":
            assert "atlas" in page.text("queue")
