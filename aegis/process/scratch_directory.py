"""A directory that is gone when this process is, however that ends.

If this process is killed, a shell removes the directory. If the shell was killed, too, the next process that makes such
a directory does: a living owner holds a lock on a file in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWNER = ".owner"

# Twice: what dies with this process may still have put something there. Beside the shell, which ends at once: what is
# no child is not ended by a library that ends the children of its process with it, as Ray does in its workers.
_AT_THE_END_OF_INPUT = 'exec 3<&0; { read -r _ <&3; rm -rf -- "$0" || { sleep 1; rm -rf -- "$0"; }; } &'


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Removed when the context ends; if this process is killed, by another one."""
    _remove_abandoned(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as directory, _owned(Path(directory)), _removed_after_us(directory):
        yield Path(directory)


@contextmanager
def _owned(directory: Path) -> Iterator[None]:
    """Under its name the file is locked from its first moment on."""
    with (directory / f"{_OWNER}-new").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (directory / f"{_OWNER}-new").rename(directory / _OWNER)
        yield


def _remove_abandoned(prefix: str) -> None:
    """Removes abandoned directories of this user only, and none that a link leads to."""
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = directory.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not _is_owned(directory / _OWNER):
                shutil.rmtree(directory, ignore_errors=True)


def _is_owned(file: Path) -> bool:
    """Raises OSError if there is no such file: then nobody can tell."""
    owner = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(owner)
    return False


@contextmanager
def _removed_after_us(directory: str) -> Iterator[None]:
    """Has a shell remove it, whose input ends with this process. If none can be started, nothing removes it."""
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
        shell.wait()
        yield
