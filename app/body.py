"""The body of a request: read within a limit, and unpacked where it came compressed."""

from __future__ import annotations

import io
import zlib

import zstandard
from fastapi import Request
from starlette.requests import ClientDisconnect

from app.api_error import ApiError, hung_up, invalid

GZIP = 16 + zlib.MAX_WBITS
"""To zlib: gzip's header and checksum around the data."""
ZSTD_WINDOW = 8 << 20
"""Bytes a zstd frame may look back, allocated for it: RFC 8878 asks every reader for as many."""


async def read_body(http: Request, limit: int) -> bytes:
    """The body, `limit` bytes of it at most, compressed and uncompressed.

    Raises ApiError: 413 as soon as it is known to be too large, 415 for a compression other than gzip and
    zstd, 400 for one that is broken, 499 when the client hangs up.
    """
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise hung_up() from None
    return _unpacked(b"".join(parts), http.headers.get("content-encoding", "identity").strip().lower(), limit)


def _unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    try:
        if encoding in ("gzip", "x-gzip"):
            body = _gunzip(body, limit)
        elif encoding == "zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).stream_reader(
                io.BytesIO(body), read_across_frames=True
            )
            body = reader.read(limit + 1)
        elif encoding not in ("", "identity"):
            raise ApiError(
                415,
                f"Content-Encoding {encoding[:40]!r} is not supported: send gzip, zstd, or the plain body.",
                param="Content-Encoding",
                code="unsupported_encoding",
                headers={"Accept-Encoding": "gzip, zstd"},
            )
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise invalid(f"The body is not valid {encoding}: {error}", "Content-Encoding") from None
    if len(body) > limit:
        raise _too_large(limit)
    return body


def _gunzip(packed: bytes, limit: int) -> bytes:
    body = b""
    # One file may follow another.
    while packed and len(body) <= limit:
        member = zlib.decompressobj(GZIP)
        body += member.decompress(packed, limit + 1 - len(body))
        if not member.eof and len(body) <= limit:
            raise EOFError("it ends too early")
        packed = member.unused_data
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body exceeds the limit of {limit} bytes.", code="body_too_large")
