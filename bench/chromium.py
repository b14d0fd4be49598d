"""Headless Chromium for tests and pictures of the live page, and what they read off it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

SCREENSHOTS = Path(__file__).parents[1] / "out" / "screenshots"

# Pixels of the rows with a colour: free slots and separators are grey.
PAINTED = """
const canvas = document.getElementById("grid");
const context = canvas.getContext("2d");
const ratio = canvas.width / canvas.clientWidth;
const top = Math.round(46 * ratio), left = Math.round(52 * ratio);
const high = canvas.height - top - Math.round(20 * ratio);
const pixels = context.getImageData(left, top, canvas.width - left, high).data;
let painted = 0;
for (let i = 0; i < pixels.length; i += 4) {
  const r = pixels[i], g = pixels[i + 1], b = pixels[i + 2];
  if (pixels[i + 3] > 0 && Math.max(r, g, b) - Math.min(r, g, b) > 40) painted += 1;
}
return painted;
"""


def chromium_missing() -> str:
    """Why the page cannot be tested here; empty if it can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return (
        f"{' and '.join(missing)} not installed (apt-get install chromium chromium-driver)" if missing else ""
    )


class Page:
    """An open live page."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def text(self, element_id: str) -> str:
        found: str = self.driver.execute_script(
            "return document.getElementById(arguments[0]).innerText", element_id
        )
        return found

    def painted(self) -> int:
        """Coloured pixels in the slots' rows."""
        count: int = self.driver.execute_script(PAINTED)
        return count

    def wait(self, done: Callable[[], object], what: str, seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                self.screenshot(f"failed-{what.replace(' ', '-')}")
                raise AssertionError(f"{what} did not happen in {seconds} s")
            time.sleep(0.05)

    def screenshot(self, name: str) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path


@contextmanager
def open_page(
    url: str, *, width: int = 1280, height: int = 1000, theme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """The page at `url` in a window of its own profile."""
    profile = tempfile.mkdtemp(prefix="page-")
    options = ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    driver = Chrome(service=Service(shutil.which("chromedriver")), options=options)
    try:
        scale = 2 if width < 600 else 1
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get(url)
        yield Page(driver)
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)
