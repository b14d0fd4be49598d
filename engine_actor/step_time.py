"""How long a step takes, learned from the steps themselves."""

from __future__ import annotations

MEMORY = 0.995
"""What a step weighs after the next one: the last few hundred decide."""
CLIP = 3.0
"""A step that is off by more typical errors than this (a stall of the machine) counts as off by so many."""
ROWS, CACHED = 16.0, 1024.0
"""What features are divided by, so that all three are of one size."""
SETTLED_STEPS = 32


class StepTime:
    """seconds = a + b * rows + c * cached tokens, by recursive least squares with forgetting.

    `rows` are those of a forward, `cached` the keys that they attend to, summed over the requests.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._theta = [0.0, 0.0, 0.0]
        self._spread = [[1e3 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._error = 0.0
        """Typical size of what the fit is off by, in seconds."""

    @property
    def settled(self) -> bool:
        """Whether enough was seen to plan by."""
        return self.steps >= SETTLED_STEPS and self._theta[1] > 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a step, of a row, and of a cached token."""
        a, b, c = self._theta
        return max(0.0, a), max(0.0, b) / ROWS, max(0.0, c) / CACHED

    def observe(self, rows: int, cached: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        x = (1.0, rows / ROWS, cached / CACHED)
        off = seconds - sum(t * v for t, v in zip(self._theta, x, strict=True))
        if self.steps >= SETTLED_STEPS:
            bound = CLIP * self._error
            off = max(-bound, min(bound, off))
        self._error += (abs(off) - self._error) * (0.5 if self.steps < SETTLED_STEPS else 0.02)
        px = [sum(p * v for p, v in zip(row, x, strict=True)) for row in self._spread]
        scale = MEMORY + sum(v * p for v, p in zip(x, px, strict=True))
        gain = [p / scale for p in px]
        self._theta = [t + g * off for t, g in zip(self._theta, gain, strict=True)]
        # Bounded: while all steps are alike, forgetting would blow it up.
        self._spread = [
            [min(1e3, max(-1e3, (p - g * q) / MEMORY)) for p, q in zip(row, px, strict=True)]
            for row, g in zip(self._spread, gain, strict=True)
        ]
        self.steps += 1

    def predict(self, rows: int, cached: int) -> float:
        """Seconds that such a step should take."""
        a, b, c = self.coefficients
        return a + b * rows + c * cached

    def rows_within(self, seconds: float, cached: int) -> int:
        """Most rows of a step that takes no longer, with so many cached tokens; at least 0."""
        a, b, c = self.coefficients
        return max(0, int((seconds - a - c * cached) / b)) if b else 0
