"""How `make test` shares tests out among its processes: tests that share a server stay together, and what takes longest
begins first, so that no process waits long for the others at the end. Tests of servers often wait, so those that only
compute run beside them."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SLOWEST = (
    "tests/unit/proxy/http/request/test_text_workers.py",
    "tests/unit/proxy/http/test_dashboard_page.py",
    "tests/tidy/test_imports.py",
    "tests/tidy/test_wheel.py",
    "tests/tidy/test_sources.py",
    "tests/unit/engine/test_transformers_engine.py",
)
"""Files that start no servers, by processor time."""

SHARING = {
    "pool": ("tests/faults",),
    "of_two": ("tests/attacks",),
    "server": (
        "tests/live/api/test_bad_input.py",
        "tests/live/api/test_clients.py",
        "tests/live/api/test_fuzz.py",
        "tests/live/api/test_openai_client.py",
        "tests/live/api/test_structured.py",
        "tests/live/models/test_exactness.py",
        "tests/live/models/test_models.py",
        "tests/live/tools/test_bench_serve.py",
        "tests/live/tools/test_dashboard.py",
        "tests/live/tools/test_history.py",
        "tests/live/tools/test_top.py",
    ),
    "roomy": (
        "tests/live/memory/test_memory_tools.py",
        "tests/live/memory/test_prefix.py",
        "tests/live/tools/test_token_path.py",
    ),
    "zoo_server": ("tests/live/models/test_architectures.py", "tests/live/processes/test_store.py"),
    "keyed": ("tests/live/api/test_caller_ids.py", "tests/live/api/test_limits.py"),
    "cluster": ("tests/unit/cluster/test_ray_cluster.py", "tests/live/processes/test_ray.py"),
}
"""What shares a server or a cluster, by its fixture, in the order in which it begins. One process runs all of a group,
or it would be started twice."""

OTHER_SERVERS = "tests/live/"


def group_of(path: str) -> str | None:
    """The fixture that the file shares with others, if it does."""
    for fixture, members in SHARING.items():
        if path.startswith(members):
            return fixture
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_file = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            of_file[item.path.relative_to(ROOT).as_posix()].append(item)
        items[:] = [item for file in sorted(of_file, key=_rank) for item in of_file[file]]


def _rank(file: str) -> int:
    """Groups take turns with the slowest files. Then come files with servers of their own, then all others."""
    group = group_of(file)
    if group is not None:
        return 2 * list(SHARING).index(group)
    if file in SLOWEST:
        return 2 * SLOWEST.index(file) + 1
    return 2 * (len(SHARING) + len(SLOWEST)) + (not file.startswith(OTHER_SERVERS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid) or str(super()._split_scope(nodeid))

    return Scheduling(config, log)
