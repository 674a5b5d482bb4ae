"""From a URL to a client of Redis, and from the client's errors to one line that never shows the password."""

from __future__ import annotations

import os
import ssl
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from aegis.core.errors import UserError
from aegis.process.error_lines import flattened

FAILURES = (RedisError, OSError, TimeoutError)
"""The errors that a command can raise when the server is away, slow, or refuses."""

_PARAMETERS = {
    "db",
    "password",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
    "username",
}
_CONNECTIONS_MAX = 16


def connect(url: str, *, timeout_s: float) -> Redis:
    """A client that connects when it is used; no command takes longer than `timeout_s`. Raises UserError."""
    _check(url)
    try:
        pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS_MAX,
            timeout=None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            client_name="aegis",
        )
    except ValueError as error:
        raise UserError(f"--redis {shown(url)}: {error}") from None
    return Redis(connection_pool=pool)


def shown(url: str) -> str:
    """The URL without what is secret in it."""
    parts = urlsplit(url)
    _, _, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{host}{parts.path}"


def why(error: BaseException) -> str:
    """The error, in a few words."""
    text = str(error).lower()
    if isinstance(error, AuthenticationError) or "wrongpass" in text or "noauth" in text:
        return "user name or password is wrong, or missing"
    if isinstance(error, NoPermissionError):
        return f"the user may not do that: {flattened(error)}"
    if isinstance(error, ResponseError) and "db index" in text:
        return "there is no such database"
    if isinstance(error, ResponseError):
        return f"the server refuses: {flattened(error)}"
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "it does not answer"
    return _network(error)


def _network(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message} (?ssl_ca_certs=FILE names who signed it)"
        if isinstance(cause, ssl.SSLError):
            return "it does not speak TLS, or not ours (redis:// is without)"
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno).lower()  # the event loop's own text differs
        cause = cause.__cause__ or cause.__context__
    return flattened(error) or "the connection was closed"


def _check(url: str) -> None:
    """Raises UserError for what the client library would pass over, or complain of with the password in it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UserError("--redis: the URL cannot be read; write redis://[USER:PASSWORD@]HOST:PORT/DATABASE") from None
    if parts.scheme == "unix" and not parts.path:
        raise UserError("--redis: unix:// is followed by the socket's path")
    if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise UserError(f"--redis {shown(url)}: the path is the number of a database, as in redis://HOST:6379/0")
    unknown = sorted(parse_qs(parts.query).keys() - _PARAMETERS)
    if unknown:
        raise UserError(
            f"--redis {shown(url)}: unknown parameter '{unknown[0]}'; known: {', '.join(sorted(_PARAMETERS))}"
        )
