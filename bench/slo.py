"""`--slo ttft=10,tbt=0.1`: when tokens are due, in seconds."""

from __future__ import annotations

from aegis.core.errors import UserError
from aegis.core.model import Slo

_NAMES = ("ttft", "tbt")


def parse_slo(text: str) -> Slo:
    """What is not named keeps its default. Raises UserError."""
    given_ns: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if name not in _NAMES or not 0 <= seconds < 1e9:
            raise UserError(f"--slo: {part!r} is no limit in seconds; give it like --slo ttft=10,tbt=0.1")
        given_ns[f"{name}_ns"] = round(seconds * 1e9)
    return Slo(**given_ns)
