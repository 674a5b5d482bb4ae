"""What the thread of an instance on the bus logs."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aegis.instance.heartbeats import _log_exception


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (OSError(9, "Bad file descriptor"), logging.DEBUG),
        (OSError(24, "Too many open files"), logging.WARNING),
        (KeyError("x"), logging.WARNING),
    ],
)
def test_a_socket_that_the_library_has_just_closed_is_no_warning(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the broker is slow, as on a machine with too few cores, each of many instances said it again and again."""
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.DEBUG, "aegis.instance.heartbeats"):
        _log_exception(loop, {"exception": error, "message": "m"})
    loop.close()
    assert [record.levelno for record in caplog.records] == [level]
