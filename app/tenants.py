"""Who a request is accounted to: its API key's tenant, or, without keys, the name it gives itself."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping

from app.api_error import ApiError, invalid

DEFAULT = "default"
OVERFLOW = "other"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
IDLE_SECONDS = 3600.0
"""An idle tenant keeps its own name for so long when there are more names than `max_tenants`."""


def digest(key: str) -> str:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Tenants:
    """Names tenants. `keys` maps the digest of each API key to its tenant; empty: no keys needed."""

    def __init__(self, keys: Mapping[str, str], max_tenants: int) -> None:
        self._keys = keys
        self._max_tenants = max_tenants
        self._last_seen: dict[str, float] = {}

    def of(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request. Raises ApiError 401 without a valid key where keys are set."""
        if self._keys:
            return self._of_key(headers.get("authorization", ""))
        name = headers.get("x-tenant-id", DEFAULT)
        if not _NAME.fullmatch(name):
            raise invalid(
                "X-Tenant-Id must be 1 to 64 letters, digits, dots, dashes or underscores, "
                "and begin with a letter or digit",
                "X-Tenant-Id",
            )
        return self._bounded(name, time.monotonic())

    def _of_key(self, authorization: str) -> str:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")
        # Looked up by digest: how long it takes says nothing about the keys.
        tenant = self._keys.get(digest(key.strip()))
        if tenant is None:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return tenant

    def _bounded(self, name: str, now: float) -> str:
        if name not in self._last_seen and len(self._last_seen) >= self._max_tenants:
            idlest = next(iter(self._last_seen))
            if now - self._last_seen[idlest] < IDLE_SECONDS:
                return OVERFLOW
            del self._last_seen[idlest]
        # Re-inserted: the first of the dict is the one seen longest ago.
        self._last_seen.pop(name, None)
        self._last_seen[name] = now
        return name
