"""Standard input, output and error, where some of them are closed."""

from __future__ import annotations

import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_closed_streams() -> None:
    """To nothing: after `aegis launch >&- 2>&-` there are none, for which Python has None. The next file or socket that
    is opened would have the number of one of them, and get what libraries and children print."""
    for name, mode in _MODES.items():
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free, which is the stream's
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
