"""Notes on a request while it is answered: for its line in the log, and the reason of a refusal."""

from __future__ import annotations

from starlette.types import Scope

from aegis.core.errors import UserError
from aegis.telemetry.logs import Value

_TURNED_AWAY = frozenset({401, 403, 429, 503})


def note(scope: Scope, **fields: Value) -> None:
    """Adds to the line."""
    scope["state"].setdefault("notes", {}).update(fields)


def notes_of(scope: Scope) -> dict[str, Value]:
    notes: dict[str, Value] = scope["state"].get("notes", {})
    return notes


def note_refusal(scope: Scope, error: UserError) -> None:
    if error.status in _TURNED_AWAY:
        scope["state"]["refused"] = error.reason or error.code or "unavailable"


def refusal_of(scope: Scope) -> str | None:
    """The reason of the refusal, in a word; None: it was not refused."""
    refused: str | None = scope["state"].get("refused")
    return refused
