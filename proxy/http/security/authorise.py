"""Access to commands to the server, which goes beyond requests to models.

If there is an admin key, it is open to those who send it. Otherwise it is open to clients on this machine, but not to
web pages that a browser shows there, nor to requests that a reverse proxy passes on.

A page may have a name of its own that leads here (DNS rebinding). To the browser it is then a page of this server, and
only the name in `Host` shows the difference. No other page can have localhost, an address, or the name that the server
listens on.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import Request

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.security.key_guard import caller_of, no_such_key
from proxy.http.settings import market_of, settings_of

_FOR_SOMEONE_ELSE = ("origin", "forwarded", "via", "x-forwarded-for", "x-real-ip")
_OWN_SITE = ("none", "same-origin")
"""Of `Sec-Fetch-Site`: an address that was typed in, and this server's own page. Browsers send no `Origin` with what a
page of another site embeds or links to, and always this."""


async def authorise(request: Request) -> None:
    """Raises UserError: 401 for a wrong key, 403 for one that is not the admin's, or a client from elsewhere."""
    caller, path = caller_of(request), shown(request.scope["path"])
    if market_of(request).keys.admin is not None:
        if caller.name and not caller.is_admin:
            raise UserError(f"{path} needs the admin key", status=403, code="forbidden")
        if not caller.is_admin:
            raise no_such_key("the admin key", request.scope)
    elif not _is_local(request):
        told = next((name for name in _FOR_SOMEONE_ELSE if name in request.headers), None)
        why = f"; the request has {told.title()!r}, so it may be somebody else's" if told else ""
        message = f"{path} is for the server's own machine only, as no admin key is set{why}"
        raise UserError(message, status=403, code="forbidden")
    elif request.headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        message = f"{path} is not for web pages of other sites, as no admin key is set; type its address"
        raise UserError(message, status=403, code="forbidden")
    elif not is_own_name(host := request.headers.get("host", ""), settings_of(request).host):
        message = f"{path} is not for {shown(host)}, as no admin key is set; ask localhost or an IP address"
        raise UserError(message, status=403, code="forbidden")


def is_own_name(host: str, listens_on: str) -> bool:
    """Whether no web page of elsewhere can be at this `Host`, which clients other than browsers may leave out."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if "@" in host:
        return False
    if not host or name in ("localhost", listens_on.lower()) or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(request: Request) -> bool:
    if any(name in request.headers for name in _FOR_SOMEONE_ELSE):
        return False
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False
