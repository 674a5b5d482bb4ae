"""How `make test` shares tests out among its processes. Tests that share a server stay together, and what takes longest
begins first, so that no process waits long for the others at the end. Tests of servers often wait, and timed attacks
leave a processor idle, so tests that only compute have processes of their own that take what all others leave."""

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
        "tests/live/api/test_anthropic_client.py",
        "tests/live/api/test_bad_input.py",
        "tests/live/api/test_clients.py",
        "tests/live/api/test_fuzz.py",
        "tests/live/api/test_openai_client.py",
        "tests/live/api/test_responses_client.py",
        "tests/live/api/test_structured.py",
        "tests/live/models/test_exactness.py",
        "tests/live/models/test_models.py",
        "tests/live/tools/test_bench_serve.py",
        "tests/live/tools/test_dashboard.py",
        "tests/live/tools/test_history.py",
        "tests/live/tools/test_top.py",
    ),
    "roomy": (
        "tests/live/api/test_second_turns.py",
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

COMPUTING = (
    "tests/parity",
    "tests/sim",
    "tests/tidy",
    "tests/unit/bench/calibration",
    "tests/unit/bench/common",
    "tests/unit/bench/compare",
    "tests/unit/bench/fidelity",
    "tests/unit/bench/plan",
    "tests/unit/bench/rivals",
    "tests/unit/bench/simulate",
    "tests/unit/bench/workloads",
    "tests/unit/core",
    "tests/unit/decode",
    "tests/unit/engine/gpu",
    "tests/unit/engine/test_lean_transformers.py",
    "tests/unit/engine/test_paged_attention.py",
    "tests/unit/engine/test_shared_steps.py",
    "tests/unit/engine/test_tiled_attention.py",
    "tests/unit/engine/test_transformers_engine.py",
    "tests/unit/engine/test_transformers_engine_chunks.py",
    "tests/unit/engine/test_transformers_engine_onednn.py",
    "tests/unit/engine/test_without_cuda.py",
    "tests/unit/memory",
    "tests/unit/prefill",
    "tests/unit/sim",
)
"""What starts no server and judges no time."""


def group_of(path: str) -> str | None:
    """The fixture that the file shares with others, if it does."""
    for fixture, members in SHARING.items():
        if path.startswith(members):
            return fixture
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-computing", action="store_true", help="leave out what `tests.background` runs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None: whatever others say."""
    computes = collection_path.relative_to(ROOT).as_posix() in COMPUTING
    return True if computes and config.getoption("--without-computing") else None


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
