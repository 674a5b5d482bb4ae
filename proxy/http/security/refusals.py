"""Requests that were turned away for who asked, when, or how often, and not for what: `/metrics` counts why."""

from __future__ import annotations

from starlette.types import Scope

from aegis.core.errors import UserError

_STATUSES = frozenset({401, 403, 429, 503})


def note_refusal(scope: Scope, error: UserError) -> None:
    if error.status in _STATUSES:
        scope["state"]["refused"] = error.reason or error.code or "unavailable"


def refusal_of(scope: Scope) -> str | None:
    """The reason of the refusal, in a word; None: it was not refused."""
    refused: str | None = scope["state"].get("refused")
    return refused
