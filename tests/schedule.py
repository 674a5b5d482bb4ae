"""How `make test` shares tests out between its two processes: files that take longest begin first, so that no process
waits long for the other at the end."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SLOWEST = (
    "tests/parity/test_parity.py",
    "tests/unit/proxy/http/request/test_text_workers.py",
    "tests/unit/engine/gpu/test_triton_attention.py",
    "tests/sim/test_faults.py",
    "tests/unit/bench/calibration/test_round_trip.py",
    "tests/sim/test_cores.py",
    "tests/sim/test_mixed.py",
    "tests/sim/test_seeds.py",
    "tests/unit/proxy/http/test_dashboard_page.py",
    "tests/unit/bench/calibration/test_calibration.py",
    "tests/tidy/test_imports.py",
    "tests/tidy/test_wheel.py",
    "tests/tidy/test_sources.py",
    "tests/sim/test_prefill_order.py",
    "tests/unit/engine/test_transformers_engine.py",
)
"""Files that start no servers, by processor time."""

TOGETHER = (
    "tests/faults/",
    "tests/live/models/test_exactness.py",
    "tests/live/models/test_mixed.py",
    "tests/live/processes/test_proxies.py",
)
"""Tests that use known answers of transformers or the servers of faults. Both take long to set up, so one process runs
all of these tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_file = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            of_file[item.path.relative_to(ROOT).as_posix()].append(item)
        files = sorted(of_file, key=lambda file: _rank(file, of_file[file]))
        items[:] = [item for file in files for item in of_file[file]]


def _rank(file: str, items: Iterable[pytest.Item]) -> int:
    """Files that do not use the shared server come last, so that a process without one can run them."""
    if file in SLOWEST:
        return SLOWEST.index(file) - len(SLOWEST)
    if file.startswith(TOGETHER):
        return 0
    return 1 if any("server" in getattr(item, "fixturenames", ()) for item in items) else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER[0] if nodeid.startswith(TOGETHER) else str(super()._split_scope(nodeid))

    return Scheduling(config, log)
