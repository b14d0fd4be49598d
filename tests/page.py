"""What tests do to an open live page, beyond looking at it."""

from __future__ import annotations

from bench.chromium import Page

NEWEST_CELL = """const canvas = document.getElementById("grid"), box = canvas.getBoundingClientRect();
const row = (canvas.clientHeight - 66) / arguments[1];
const y = box.top + 46 + row * (arguments[0] + 0.5);
canvas.dispatchEvent(new MouseEvent("click", {clientX: box.right - 4, clientY: y}));"""
FOREIGN = """return performance.getEntriesByType('resource').map(e => e.name)
.filter(name => !name.startsWith(location.origin))"""


def click_newest_cell(page: Page, slot: int, slots: int = 16) -> None:
    """Click into the newest column of a slot's row."""
    page.driver.execute_script(NEWEST_CELL, slot, slots)


def problems(page: Page) -> list[str]:
    """Errors on the console, and anything loaded from elsewhere."""
    console = [str(entry["message"]) for entry in page.driver.get_log("browser")]
    foreign: list[str] = page.driver.execute_script(FOREIGN)
    return console + foreign
