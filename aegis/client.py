"""The admin side of a running server, as the command line uses it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from aegis.core.errors import UserError

if TYPE_CHECKING:
    from aegis.telemetry.memory_report import MemoryReport


ADMIN_KEY = "AEGIS_SERVER_ADMIN_KEY"
"""The variable that gives a server its admin key, and the command line the key of the server it talks to."""


class Refused(UserError):
    """The server was reached and said no; its own words."""


class AdminClient:
    """Talks to one server. Raises UserError where it cannot be reached or is no aegis, Refused where it says no."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a server; give one like --url http://127.0.0.1:8000")

    def models(self) -> list[dict[str, Any]]:
        """The served models, as `/v1/models` lists them."""
        listed = self._call("GET", "/v1/models").get("data")
        if not isinstance(listed, list):
            raise UserError(f"{self._url} answers, but is no aegis server")
        return listed

    def add(self, source: str, name: str | None = None) -> dict[str, Any]:
        """Registers a checkpoint directory or hub id. Returns when it is served."""
        return self._call("POST", "/models/load", {"source": source} | ({"name": name} if name else {}))

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

    def _moved(self, how: str, body: dict[str, object]) -> int:
        return int(self._call("POST", f"/debug/memory/{how}", body).get("given_back_bytes", 0))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        import httpx  # a tenth of a second, which `aegis --help` need not pay

        key = os.environ.get(ADMIN_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(connect=5.0, read=None, write=30.0, pool=None)
        try:
            response = httpx.request(
                method, self._url + path, json=body, headers=headers, timeout=timeout, trust_env=False
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UserError(f"no server at {self._url} ({error}); is `aegis launch` running there?") from None
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(f"{self._url} answers, but is no aegis server")
        if response.is_error:
            raise Refused(
                _reason(content) or f"the server answered {response.status_code}", status=response.status_code
            )
        return content


def _reason(content: dict[str, Any]) -> str | None:
    error = content.get("error")
    return error.get("message") if isinstance(error, dict) else None
