"""Who may command the server, beyond asking models something.

With an admin key those that send it, without one those on this machine, but no web page that a browser shows there and
nobody a reverse proxy stands for.
"""

from __future__ import annotations

from hmac import compare_digest
from ipaddress import ip_address

from fastapi import Request

from aegis.core.errors import UserError
from proxy.http.settings import settings_of

_FOR_SOMEONE_ELSE = ("origin", "forwarded", "via", "x-forwarded-for", "x-real-ip")


async def authorise(request: Request) -> None:
    """Raises UserError: 401 for a wrong key, 403 for a client from elsewhere."""
    key = settings_of(request).admin_key
    if key is not None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not compare_digest(sent.encode(), key.encode()):
            raise UserError("send the admin key as 'Authorization: Bearer …'", status=401, code="invalid_api_key")
    elif not _is_local(request):
        message = f"{request.url.path} is for the server's own machine only, as no admin key is set"
        raise UserError(message, status=403, code="forbidden")


def _is_local(request: Request) -> bool:
    if any(name in request.headers for name in _FOR_SOMEONE_ELSE):
        return False
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False
