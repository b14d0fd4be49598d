"""From a body of JSON to a request, or to an error that names the field at fault.

A field that is neither OpenAI's nor listed here is refused by name, as OpenAI does: a misspelt
`min_pp` should not pass in silence. OpenAI fields that change nothing here are accepted.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from app.api_error import ApiError, invalid

Schema = TypeVar("Schema", bound=BaseModel)

_UNSUPPORTED = (
    "tools",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "use_beam_search",
    "moderation",
)


def parse(schema: type[Schema], body: bytes) -> Schema:
    """A request from its JSON. Raises ApiError naming the field at fault."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _as_api_error(error) from None


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    kind, location, message = first["type"], first["loc"], first["msg"]
    param = _path(location)
    if kind == "json_invalid":
        return invalid(f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if kind == "extra_forbidden":
        if param in _UNSUPPORTED:
            return invalid(f"'{param}' is not supported by this server.", param, "unsupported_parameter")
        return invalid(f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    message = message.removeprefix("Value error, ")
    if not location and ": " in message:
        # A check over several fields names the one at fault itself.
        param, message = message.split(": ", 1)
    if not param:
        return invalid(f"The body must be a JSON object: {message}")
    return invalid(f"Invalid '{param}': {message}", param, "invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from ("messages", 0, "content"), without a union's branch names."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif "[" not in part and part not in ("str", "int"):
            path += f".{part}" if path else part
    return path
