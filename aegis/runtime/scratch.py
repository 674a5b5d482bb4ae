"""A directory that is gone when this process is, however that ends."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Twice: what dies with this process may still have put something there.
_AT_THE_END_OF_INPUT = 'read -r _; rm -rf -- "$0" || { sleep 1; rm -rf -- "$0"; }'


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Removed on leaving, and by somebody else where this process is killed."""
    with tempfile.TemporaryDirectory(prefix=prefix) as directory, _removed_after_us(directory):
        yield Path(directory)


@contextmanager
def _removed_after_us(directory: str) -> Iterator[None]:
    """By a shell, whose input ends with this process. Where none can be started nobody does it."""
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _AT_THE_END_OF_INPUT, directory],
            stdin=subprocess.PIPE,
            env={"PATH": os.defpath},
            process_group=0,  # Ctrl-C in a terminal is not for it
        )
    except OSError:
        yield
        return
    with shell:
        yield
