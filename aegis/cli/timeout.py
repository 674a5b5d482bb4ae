"""The option `--timeout` of commands that wait for a server to do something."""

from __future__ import annotations

from typing import Annotated

import typer

from aegis.core.errors import UserError

_MAX_S = 3600.0


def _checked(timeout_s: float) -> float:
    """Raises UserError, also for what is no number: no message could hold it."""
    if not 0 < timeout_s <= _MAX_S:
        raise UserError(f"--timeout: should be above 0 and at most {_MAX_S:g}, not {timeout_s:g}")
    return timeout_s


Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", help="Give up after so many seconds.", callback=_checked)
]
