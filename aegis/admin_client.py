"""The admin side of a running server, as the command line uses it."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aegis.core.errors import UserError

if TYPE_CHECKING:
    import ssl

    import httpx

    from aegis.telemetry.live_view import Live, SeenUntil
    from aegis.telemetry.memory_report import MemoryReport
    from aegis.telemetry.node_report import NodeReport

DEFAULT_URL = "http://127.0.0.1:8000"

URL = "AEGIS_URL"
"""The variable that gives commands the address of the server they talk to, where no option does."""

ADMIN_KEY, API_KEY = "AEGIS_ADMIN_KEY", "AEGIS_API_KEY"
"""The variables that give a server its keys, and the command line those of the server it talks to."""


_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # as versions of OpenSSL have it
_UNTRUSTED = re.compile(r"certificate verify failed: (.+?)\.? \(_ssl")
_HUNG_UP = ("Server disconnected", "Connection reset by peer")  # as httpx, aiohttp and the system have it
_REMEDIES = {"mismatch": "give an address that it names", "expired": "renew it"}
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
_TRUST = "SSL_CERT_FILE=FILE names the certificates to trust"

_LIVE_S = 10.0
"""Within which a server says what it does now; commands may take as long as they do."""

_NEVER = 10**17  # the number of a span that no server lives to see


@cache
def _certificates(*, tls: bool) -> ssl.SSLContext:
    """Those that are trusted, also by SSL_CERT_FILE; none where there is no TLS. httpx would load them for each
    request, for 20 ms; `aegis top` makes several a second. Raises UserError where that file cannot be read."""
    import ssl

    import httpx

    if not tls:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context(trust_env=True)
    except OSError as error:  # also of OpenSSL
        reason = "it holds no certificates, PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise UserError(f"SSL_CERT_FILE: {os.environ.get('SSL_CERT_FILE')}: {reason}") from None


def _is_of_variable(url: str) -> bool:
    return bool(url) and url == os.environ.get(URL)


def check_address(url: str, option: str = "--url") -> None:
    """Raises UserError, with the option or the variable that gives it, where no server can have that address."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # raises ValueError beyond 65535, which sockets count on from 0
        possible = bool(host and host.encode("idna")) and " " not in parts.netloc and url.isprintable()
        possible = possible and not parts.query and not parts.fragment
    except ValueError:
        possible = False
    if not possible or not url.startswith(("http://", "https://")):
        source = URL if _is_of_variable(url) else option
        raise UserError(f"{source}: {url!r} is no address of a server; give one like http://127.0.0.1:8000")


def tls_mistake(url: str, error: Exception) -> str | None:
    """What is wrong where a connection failed because one side speaks TLS and the other plain HTTP, or trusts no such
    certificate. Clients keep OpenSSL's words, but not its error."""
    told = str(error)
    if any(reason in told for reason in _PLAIN):
        return f"the server at {url} speaks http://, not https://"
    if found := _UNTRUSTED.search(told):
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in found[1]), _TRUST)
        return f"the certificate of the server at {url} is not trusted ({found[1]}); {remedy}"
    if url.startswith("http://") and any(words in told for words in _HUNG_UP):
        return f"the server at {url} hung up without an answer; does it speak https://, or has it ended?"
    return None


def why_unreached(error: Exception) -> str:
    """The system's words; clients put numbers, or the addresses that they tried, around them."""
    import ssl

    cause = getattr(error, "os_error", error)  # aiohttp's
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and cause.errno:
        return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)  # below 0: of names
    return _ERRNO.sub("", str(error)) or type(error).__name__


def _key_of_environment() -> str | None:
    """Raises UserError."""
    name = next((name for name in (ADMIN_KEY, API_KEY) if os.environ.get(name)), None)
    return _checked(name, os.environ[name]) if name else None


def _checked(where: str, key: str) -> str:
    """Raises UserError, which does not quote it, for what is no key of any server."""
    from aegis.core.api_keys import is_key  # imports msgspec, which is like httpx

    if not is_key(key):
        raise UserError(f"{where}: a key is one word of printable ASCII characters")
    return key


class Refused(UserError):
    """The server was reached and said no; its own words."""


class AdminClient:
    """Talks to one server. Raises UserError if it cannot be reached or is no aegis, Refused where it says no.

    `key` is its admin key, taken from the environment if not given; without one, an API key lists its models.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        check_address(url)
        self._says = f", as {URL} says" if _is_of_variable(url) else ""
        self._url = url.rstrip("/").removesuffix("/v1")  # which clients of its API have at the end
        self.key = _checked("--admin-key", key) if key else _key_of_environment()
        """Also of its API, whose requests need one where it has any."""

    def models(self, *, coming: bool = False) -> list[dict[str, Any]]:
        """The served models, as `/v1/models` lists them, and those that are `coming`, too."""
        answer = self._call("GET", "/v1/models")
        listed, others = answer.get("data"), answer.get("coming", [])
        if not isinstance(listed, list) or not isinstance(others, list):
            raise UserError(f"{self._url} answers, but is no aegis server")
        return [*listed, *others] if coming else listed

    def add(
        self, source: str, name: str | None = None, *, base: str | None = None, lazy: bool = False
    ) -> dict[str, Any]:
        """Registers a checkpoint directory, a GGUF file, a hub id or an address, or an adapter of the model `base`.
        Returns when it is served, or, if it is `lazy`, was looked at."""
        given = {"name": name, "base": base, "lazy": lazy}
        more = {key: value for key, value in given.items() if value}
        return self._call("POST", "/models/load", {"source": source, **more})

    def update(self, model: str, **changes: Any) -> dict[str, Any]:
        """Changes deadlines, priority, limits, the pace or the pin of a model; what is None stays."""
        given = {name: value for name, value in changes.items() if value is not None}
        return self._call("POST", "/models/update", {"model": model, **given})

    def unload(self, model: str) -> dict[str, Any]:
        """Takes a model's weights out of memory; it is served as before."""
        return self._call("POST", "/models/evict", {"model": model})

    def remove(self, model: str) -> dict[str, Any]:
        """Takes a model out of the market."""
        return self._call("POST", "/models/unload", {"model": model})

    def memory(self) -> MemoryReport:
        """All memory of the server, as `/debug/memory` tells it."""
        import msgspec  # like httpx

        from aegis.telemetry.memory_report import MemoryReport

        try:
            return msgspec.convert(self._call("GET", "/debug/memory"), MemoryReport)
        except msgspec.ValidationError:
            raise UserError(f"{self._url} answers, but is no aegis server of this version") from None

    def limit_memory(self, instance: str, nbytes: int, *, timeout_s: float) -> int:
        """Returns when the instance holds no more: how many bytes it gave back."""
        return self._moved("limit", {"instance": instance, "limit": nbytes, "timeout_s": timeout_s})

    def trim_memory(self, instance: str, *, timeout_s: float) -> int:
        """Returns when the instance has given back what it does not need: how many bytes."""
        return self._moved("trim", {"instance": instance, "timeout_s": timeout_s})

    def node(self) -> NodeReport:
        """The parts of the server."""
        import msgspec

        from aegis.telemetry.node_report import NodeReport

        try:
            return msgspec.convert(self._call("GET", "/debug/node"), NodeReport)
        except msgspec.ValidationError:
            raise UserError(f"{self._url} answers, but is no aegis server of this version") from None

    def spans(self, since: int = 0) -> bytes:
        """The recent spans of its instances, one a line, from that number on."""
        return self._lines("/debug/spans", since).content

    def records(self, since: int = 0) -> bytes:
        """The recent records of its requests, one a line, from that number on."""
        return self._lines("/debug/records", since).content

    def decisions(self, since: int = 0) -> tuple[bytes, int]:
        """The recent decisions and their reasons, one a line, from that number on, and the number to go on from."""
        response = self._lines("/debug/decisions", since)
        return response.content, int(response.headers["aegis-next"])

    def live(self, seen: SeenUntil) -> Live:
        """The server as it is now, and what it did beyond what was seen."""
        import msgspec

        from aegis.telemetry.live_view import Live

        path = "/debug/live?" + "&".join(f"{name}={value}" for name, value in msgspec.structs.asdict(seen).items())
        response = self._send("GET", path, within_s=_LIVE_S)
        if response.is_error:
            raise self._refusal(response)
        try:
            return msgspec.json.decode(response.content, type=Live)
        except msgspec.MsgspecError:
            raise UserError(f"{self._url} answers, but is no aegis server of this version") from None

    def counter(self, name: str, label: str) -> dict[str, int]:
        """A metric's values by one of its labels, added up over the others; empty if there is none of that name."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, int] = {}
        for family in text_string_to_metric_families(self._text("/metrics")):
            for sample in family.samples:
                if sample.name == name:
                    value = sample.labels.get(label, "")
                    values[value] = values.get(value, 0) + round(sample.value)
        return values

    def next_number(self, what: str) -> int:
        """Of "spans", "records" or "decisions": those from that number on are yet to come."""
        return int(self._lines(f"/debug/{what}", _NEVER).headers["aegis-next"])

    def _moved(self, how: str, body: dict[str, object]) -> int:
        return int(self._call("POST", f"/debug/memory/{how}", body).get("given_back_bytes", 0))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self._send(method, path, body)
        if response.is_error:
            raise self._refusal(response)
        return self._object(response)

    def _lines(self, path: str, since: int) -> httpx.Response:
        response = self._send("GET", f"{path}?since={since}")
        if response.is_error:
            raise self._refusal(response)
        if "jsonl" not in response.headers.get("content-type", ""):
            raise UserError(f"{self._url} answers, but is no aegis server of this version")
        return response

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, within_s: float | None = None
    ) -> httpx.Response:
        import httpx  # a tenth of a second, which `aegis --help` need not pay

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = httpx.Timeout(connect=5.0, read=within_s, write=30.0, pool=None)
        try:
            return httpx.request(
                method,
                self._url + path,
                json=body,
                headers=headers,
                timeout=timeout,
                trust_env=False,
                verify=_certificates(tls=self._url.startswith("https:")),
            )
        except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:  # the last: no host can have such a name
            if mistake := tls_mistake(self._url, error):
                raise UserError(mistake) from None
            why = why_unreached(error)
            raise UserError(f"no server at {self._url}{self._says} ({why}); is `aegis launch` running there?") from None

    def _text(self, path: str) -> str:
        response = self._send("GET", path)
        if response.is_error:
            raise self._refusal(response)
        return response.text

    def _refusal(self, response: httpx.Response) -> UserError:
        content, parts = self._object(response), urlsplit(self._url)
        error = content.get("error")
        if parts.path and isinstance(error, dict) and error.get("code") == "no_such_route":
            without = self._url.removesuffix(parts.path)
            return UserError(f"the server at {without} has nothing at {parts.path}; give its address without a path")
        return _refused(response.status_code, content)

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(f"{self._url} answers, but is no aegis server")
        return content


def _refused(status: int, content: dict[str, Any]) -> Refused:
    reason = _reason(content) or f"the server answered {status}"
    return Refused(
        f"{reason} (commands take keys from {ADMIN_KEY} and {API_KEY})" if status == 401 else reason, status=status
    )


def _reason(content: dict[str, Any]) -> str | None:
    error = content.get("error")
    return error.get("message") if isinstance(error, dict) else None
