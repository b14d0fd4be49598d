"""What `serve run` prints: all of it goes into a file, what concerns people onto the screen."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

FILE_BYTES = 8 << 20
"""After so many a new file begins; the one before stays as `serve.log.1`."""
TAIL_LINES = 30

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OURS = re.compile(r"\((?:\S+-engine-\d+|ServeReplica:\S+:Ingress) pid=")
_TROUBLE = re.compile(r"\b(?:ERROR|CRITICAL)\b")
_DASHBOARD = re.compile(r"View the dashboard at (\S+)")


class ServeLog:
    """Keeps the server's output in the file `path`. `show` gets the lines of engines and HTTP replicas, and
    errors of anyone; with `everything`, all. Raises OSError when the file cannot be written.
    """

    def __init__(self, path: Path, show: Callable[[str], object], *, everything: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.dashboard: str | None = None
        """Where Ray's dashboard is, once Ray has said so."""
        self._file = RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=1)
        self._show = show
        self._everything = everything
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread: threading.Thread | None = None

    def read(self, lines: Iterable[bytes]) -> None:
        """Take the output in, to its end, on a thread of its own."""
        self._thread = threading.Thread(target=self._read, args=(lines,), name="serve-log", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the output."""
        if self._thread is not None:
            self._thread.join(timeout)

    def tail(self) -> str:
        """The last lines, shown or not, once there will be no more or a second has passed."""
        self.join(timeout=1)
        return "\n".join(self._tail)

    def _read(self, lines: Iterable[bytes]) -> None:
        for raw in lines:
            line = _COLOUR.sub("", raw.decode(errors="replace")).rstrip()
            self._tail.append(line)
            self._file.emit(LogRecord("serve", 0, "", 0, line, None, None))
            if found := _DASHBOARD.search(line):
                self.dashboard = found[1]
            if self._everything or _OURS.match(line) or _TROUBLE.search(line):
                self._display(line)
        self._file.close()

    def _display(self, line: str) -> None:
        try:
            self._show(line)
        except (OSError, ValueError, SystemExit):
            # The screen is gone, or cannot show it. A server whose pipe nobody empties would stand still.
            self._show = lambda _: None
