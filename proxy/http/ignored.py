"""What a request asks for that is not served here and not needed for an answer: it is passed over and told of, in the
header `X-Aegis-Ignored` of the reply and in the log."""

from __future__ import annotations

from fastapi import Request, Response

from proxy.http.request_notes import note

HEADER = "x-aegis-ignored"
_CHARACTERS_MAX = 1024


class Ignored:
    """The parts of one request that are ignored."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, place: str, kind: object = "") -> None:
        """`place` is the path of a parameter, `kind` says more of its value."""
        self._parts.append(f"{place} ({kind})" if kind else place)

    def told(self, within: str = "", characters_max: int = _CHARACTERS_MAX) -> str:
        """The ignored parameters whose places begin with `within`, on one line."""
        text = ", ".join(part for part in self._parts if part.startswith(within))[:characters_max]
        return "".join(character if " " <= character <= "~" else "?" for character in text)

    def tell(self, request: Request, response: Response) -> Response:
        """The response, which says it."""
        if text := self.told():
            response.headers[HEADER] = text
            note(request.scope, ignored=text)
        return response
