"""Limits on the use of a server by one key, or of one model."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Limits(Struct, frozen=True):
    """None: as much as there is. Tokens are those of prompts and answers, as `usage` tells them."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None  # requests being answered at one time

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self != UNLIMITED


UNLIMITED = Limits()


class Scope(Struct, frozen=True):
    """The key or the model that has the limits."""

    kind: Literal["key", "model"]
    name: str
    limits: Limits
