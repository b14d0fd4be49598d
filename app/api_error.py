"""Answers other than success, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REASONS = {400: "invalid_request", 401: "no_api_key", 404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """An answer other than success, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def reason(self) -> str:
        """Its code, or what its status says: one of a few."""
        return self.code or _REASONS.get(self.status, f"status_{self.status}")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        elif self.status == 401:
            kind = "authentication_error"
        else:
            kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def hung_up() -> ApiError:
    """For the record alone: nobody is there to read it."""
    return ApiError(499, "The client closed the connection.")
