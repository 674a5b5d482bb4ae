"""Notes on a request, which its line in the log has besides its path and status."""

from __future__ import annotations

from starlette.types import Scope

from aegis.telemetry.logs import Value


def note(scope: Scope, **fields: Value) -> None:
    """Adds to the line."""
    scope["state"].setdefault("notes", {}).update(fields)


def notes_of(scope: Scope) -> dict[str, Value]:
    notes: dict[str, Value] = scope["state"].get("notes", {})
    return notes
