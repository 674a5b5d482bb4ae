"""The request body: bounded, and one JSON object whose names are each given once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from aegis.core.errors import UserError
from aegis.core.ids import MODEL_NAME_PATTERN
from proxy.http.client_disconnect import ClientGone, while_connected
from proxy.http.errors import shown
from proxy.http.fields import F, Fields
from proxy.http.json_bounds import check_counts, check_names, json_problem
from proxy.http.parameters import Text, required
from proxy.http.request.worker_thread import beside_loop
from proxy.http.security.admission import admit_early, who
from proxy.http.security.http_protocol import broken_off
from proxy.http.security.large_bodies import SMALL_BYTES, sent_in_time
from proxy.http.settings import large_bodies_of

PARAMETERS_MAX = 256


class _Key(str):
    """A type of its own, so that decoding shows every name to its hook, repeated ones too."""

    __slots__ = ()


class ModelBody(Fields):
    """A body that names a model. Whatever text is sent, one that cannot be a name is answered like an unknown one."""

    model = required(Text(None, narrower={"pattern": f"^{MODEL_NAME_PATTERN}$"}))


async def read_body(request: Request, kind: type[F], bytes_max: int) -> F:
    """The parameters of the request, none of them read yet.

    Raises UserError: 413 beyond `bytes_max`, 415 where it is compressed, 408 where its rest does not come, 429 where it
    is large and its caller has reached a limit, 400 where it is no JSON object; ClientGone where the client leaves.
    """
    body = await _read(request, bytes_max)
    if len(body) <= SMALL_BYTES:
        return kind(parse_object(body), nbytes=len(body))
    parsing = beside_loop(lambda: parse_object(body), len(body), few=SMALL_BYTES)
    return kind(await while_connected(request.receive, parsing), nbytes=len(body))


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises UserError if `body` is not one JSON object, or names something twice in an object."""
    seen: dict[str, None] = {}

    def once(_: type, name: str) -> _Key:
        if name in seen:
            raise UserError(f"{shown(name)} is given more than once", param=name[:200])
        if len(seen) >= PARAMETERS_MAX:
            raise UserError(f"the body has more than {PARAMETERS_MAX} parameters", code="invalid_json")
        seen[name] = None
        return _Key(name)

    if not body or body.isspace():
        raise UserError("the body is empty: send a JSON object", code="invalid_json")
    check_counts(body)
    try:
        parsed = msgspec.json.decode(body, type=dict[_Key, Any], dec_hook=once)
        if body.count(b"{") > 1:
            check_names(body)
    except msgspec.ValidationError as error:
        if seen and "out of range" in str(error):
            last = next(reversed(seen))
            message = f"{shown(last)} has a number that is too large"
            raise UserError(message, param=last[:200], code="invalid_json") from None
        raise UserError(f"the body must be a JSON object: {error}", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not valid JSON: {json_problem(body, error)}", code="invalid_json") from None
    return {str(name): value for name, value in parsed.items()}


async def _read(request: Request, bytes_max: int) -> bytes:
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if not {coding.strip().lower() for coding in encoding.split(",")} <= {"", "identity"}:
        message = f"Content-Encoding {shown(encoding)} is not understood: send the body as it is"
        raise UserError(message, status=415, param="Content-Encoding", code="unsupported_encoding")
    declared = request.headers.get("content-length", "")
    expected = int(declared[:20]) if declared.isdigit() else bytes_max
    if expected > bytes_max:
        raise _too_large(bytes_max)
    if declared and expected > SMALL_BYTES:
        await admit_early(request)
    pieces = request.stream()
    try:
        body = await _pieces(pieces, bytes_max, SMALL_BYTES)
        if len(body) > SMALL_BYTES:
            await admit_early(request)
            await large_bodies_of(request).hold(request.scope, who(request), expected)
            async with sent_in_time(expected):
                body = b"".join((body, await _pieces(pieces, bytes_max - len(body), bytes_max)))
    except ClientDisconnect:
        raise ClientGone from None
    if error := broken_off(request.scope):
        raise error
    return body


async def _pieces(pieces: AsyncIterator[bytes], bytes_max: int, enough: int) -> bytes:
    """The pieces that still come, until there are more than `enough` of them."""
    read, size = list[bytes](), 0
    async for piece in pieces:
        size += len(piece)
        read.append(piece)
        if size > bytes_max:
            raise _too_large(bytes_max)
        if size > enough:
            break
    return b"".join(read)


def _too_large(bytes_max: int) -> UserError:
    return UserError(f"the body is larger than {bytes_max} bytes", status=413, code="body_too_large")
