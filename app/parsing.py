"""From a body of JSON to a request, or to an error that names the field at fault.

What asks for something that this server cannot do is refused. Other fields that nobody here knows are
ignored, as the clients that send them to every server expect, and named: in a header, and once in the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from app.api_error import ApiError, invalid
from app.schemas import FIELD_ERROR, Schema

log = logging.getLogger("ray.serve")

Body = TypeVar("Body", bound=Schema)

IGNORED_HEADER = "X-Ignored-Fields"
SHOWN_NAMES = 16
NAME_LENGTH = 64
REMEMBERED_NAMES = 256
"""Fields that are told apart in the log; later ones pass without a word there."""

_UNSUPPORTED = {
    "tools",
    "tool_calls",
    "functions",
    "function_call",
    "audio",
    "web_search_options",
    "moderation",
    "use_beam_search",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
}


def parse(schema: type[Body], body: bytes) -> Body:
    """A request from its JSON. Raises ApiError naming the field at fault."""
    try:
        request = schema.model_validate_json(body)
    except ValidationError as error:
        raise _as_api_error(error) from None
    for path, value in _strangers(request):
        if value and _asks(path):
            raise invalid(f"'{path}' is not supported by this server.", path, "unsupported_parameter")
    return request


class IgnoredFields:
    """Tells clients and operators which fields of requests have no effect here."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def header(self, request: Schema) -> dict[str, str]:
        """The header that names them; empty where there are none."""
        # Clients send answers back, which have fields that are there and say nothing.
        paths = [path for path, value in _strangers(request) if value or (value == 0 and not _asks(path))]
        names = list(dict.fromkeys(_shown(re.sub(r"\[\d+\]", "[]", path)) for path in paths))
        for name in names:
            if name not in self._warned and len(self._warned) < REMEMBERED_NAMES:
                self._warned.add(name)
                log.warning("a request has the field %s, which has no effect here (told once)", name)
        shown = names[:SHOWN_NAMES] + ["..."] * (len(names) > SHOWN_NAMES)
        return {IGNORED_HEADER: ", ".join(shown)} if names else {}


def _asks(path: str) -> bool:
    """Whether a field of that name, unless empty, asks for what this server cannot do."""
    return path.rpartition(".")[2] in _UNSUPPORTED


def _shown(name: str) -> str:
    return quote(name[:NAME_LENGTH], safe="[]", errors="replace")


def _strangers(request: Schema, where: str = "") -> Iterator[tuple[str, object]]:
    """Fields that no schema has, wherever they stand, by path, with their values."""
    for name, value in (request.model_extra or {}).items():
        yield where + name, value
    for name in type(request).model_fields:
        value = getattr(request, name)
        if isinstance(value, Schema):
            yield from _strangers(value, f"{where}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Schema):
            for index, item in enumerate(value):
                yield from _strangers(item, f"{where}{name}[{index}].")


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    kind, location, message = first["type"], first["loc"], first["msg"]
    if kind == FIELD_ERROR:
        location = (*location, first["ctx"]["field"])
    param = _path(location)
    if kind == "json_invalid":
        return invalid(f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if not param:
        return invalid(f"The body must be a JSON object: {message}")
    return invalid(f"Invalid '{param}': {message.removeprefix('Value error, ')}", param, "invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from ("messages", 0, "content"), without a union's branch names."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif "[" not in part and part not in ("str", "int"):
            path += f".{part}" if path else part
    return path
