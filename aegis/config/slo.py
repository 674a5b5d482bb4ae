"""`--slo ttft=10,tbt=0.1,gap=0.5`: when tokens are due, and how long a stream may pause, in seconds."""

from __future__ import annotations

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.model import SLO_NS_MAX, SLO_NS_MIN, Slo

_NAMES = ("ttft", "tbt", "gap")


def parse_slo(text: str) -> Slo:
    """Deadlines that the text does not name keep their default. Raises UserError."""
    return Slo(**{f"{name}_ns": limit_ns for name, limit_ns in limits_ns(text).items()})


def limits_ns(text: str, origin: str = "--slo") -> dict[str, int]:
    """What is named of `ttft`, `tbt` and `gap`. Raises UserError, which says that `origin` is to be mended."""
    given_ns: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if name not in _NAMES:
            raise UserError(f"{origin}: {part!r} sets none of ttft, tbt and gap; give seconds, like ttft=10,tbt=0.1")
        if name in given_ns:
            raise UserError(f"{origin}: {name!r} is given twice")
        if not SLO_NS_MIN <= seconds * NS_PER_S <= SLO_NS_MAX:
            raise UserError(
                f"{origin}: {part!r} is no limit from a microsecond to a day; give seconds, like ttft=10,tbt=0.1"
            )
        given_ns[name] = round(seconds * NS_PER_S)
    return given_ns
