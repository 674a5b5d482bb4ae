"""How `make test` shares tests out between its two processes: files that take longest begin first, so that no process
waits long for the other at the end."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

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
"""Of those without servers, by processor time."""

TOGETHER = ("cases", "server")
"""Session fixtures that take long to set up. All tests of the first run in one process; tests of the second come next,
so that another process does without it if it has other tests left."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    of_file = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        of_file[item.path.relative_to(ROOT).as_posix()].append(item)
    items[:] = [item for file in sorted(of_file, key=lambda file: _rank(file, of_file[file])) for item in of_file[file]]
    if config.getoption("loadgroup", False):
        for file, own in of_file.items():
            for item in own:
                item.add_marker(pytest.mark.xdist_group(TOGETHER[0] if _needs(own, TOGETHER[0]) else file))


def _rank(file: str, items: Iterable[pytest.Item]) -> int:
    if file in SLOWEST:
        return SLOWEST.index(file) - len(SLOWEST)
    return next((rank for rank, name in enumerate(TOGETHER) if _needs(items, name)), len(TOGETHER))


def _needs(items: Iterable[pytest.Item], fixture: str) -> bool:
    return any(fixture in getattr(item, "fixturenames", ()) and not item.get_closest_marker("skip") for item in items)
