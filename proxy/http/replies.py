"""JSON replies by msgspec."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Response
from msgspec import Struct
from msgspec.json import Encoder

encode = Encoder().encode


def json_reply(value: Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, dict(headers or {}), "application/json")
