"""Tests that take long and show little that shorter ones do not: they run where AEGIS_TEST_LONG asks for them."""

from __future__ import annotations

import os

import pytest

LONG = os.environ.get("AEGIS_TEST_LONG", "") not in ("", "0")
_REASON = "takes long; make test-long, test-live, test-faults and test-attacks run it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if not LONG else ():
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason=_REASON))
