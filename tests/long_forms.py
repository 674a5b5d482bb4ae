"""Tests that take long and show little that shorter ones do not: they run where AEGIS_TEST_LONG asks for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

LONG = os.environ.get("AEGIS_TEST_LONG", "") not in ("", "0")
_REASON = "takes long; make test-long, test-live, test-faults and test-attacks run it"


def first_of(count: int, values: Sequence[Any]) -> list[Any]:
    """The values for `parametrize`, of which those after the first `count` are left to the long form."""
    return [*values[:count], *(pytest.param(value, marks=pytest.mark.long) for value in values[count:])]


def first_rows_of(count: int, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The same where each value is of several arguments."""
    return [*rows[:count], *(pytest.param(*row, marks=pytest.mark.long) for row in rows[count:])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if not LONG else ():
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason=_REASON))
