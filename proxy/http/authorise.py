"""Who may command the server, beyond asking models something.

With an admin key those that send it, without one those on this machine, but no web page that a browser shows there and
nobody a reverse proxy stands for.
"""

from __future__ import annotations

from ipaddress import ip_address

from fastapi import Request

from aegis.core.errors import UserError
from proxy.http.keys import caller_of, no_such_key
from proxy.http.settings import market_of

_FOR_SOMEONE_ELSE = ("origin", "forwarded", "via", "x-forwarded-for", "x-real-ip")


async def authorise(request: Request) -> None:
    """Raises UserError: 401 for a wrong key, 403 for one that is not the admin's, or a client from elsewhere."""
    caller = caller_of(request)
    if market_of(request).keys.admin is not None:
        if caller.name and not caller.is_admin:
            raise UserError(f"{request.url.path} needs the admin key", status=403, code="forbidden")
        if not caller.is_admin:
            raise no_such_key("the admin key")
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
