"""Standard input, output and error, where they are closed or cannot show all characters."""

from __future__ import annotations

import io
import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def prepare_streams() -> None:
    """Whatever they are, printing to them does not fail for it."""
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":  # else it has an answer of its own
            stream.reconfigure(errors="backslashreplace")


def _open_closed() -> None:
    """To nothing: after `aegis launch >&- 2>&-` there are none, for which Python has None. The next file or socket that
    is opened would have the number of one of them, and get what libraries and children print."""
    for name, mode in _MODES.items():
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free, which is the stream's
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
