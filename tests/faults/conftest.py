"""The short form, which `make test` runs, has one moment for each fault, and often half of the requests. The long form
(AEGIS_TEST_LONG=1) has three, of more faults, with embedded and with external services. Moments are drawn from
AEGIS_TEST_SEED."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aegis.core.rng import Stream as Draws
from tests.faults.figures import Figures
from tests.faults.pool import INSTANCES, Pool, opened
from tests.live.cases import Case
from tests.long_forms import LONG
from tests.shared_servers import shared

SEED = int(os.environ.get("AEGIS_TEST_SEED", "0"))
MOMENTS = 3 if LONG else 1
CASES = 64 if LONG else 32
"""Of each model the first: the shortest and the longest prompt and output are among them."""

FIRST_MOMENT, LAST_MOMENT = 0.03, 0.6

_figures = Figures(strict=LONG)
_lines: list[str] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`moment`: the share of all tokens that have come when it happens."""
    if "moment" in metafunc.fixturenames:
        draws = Draws(SEED, "faults", metafunc.definition.nodeid)
        moments = [FIRST_MOMENT + (LAST_MOMENT - FIRST_MOMENT) * draws.uniform() for _ in range(MOMENTS)]
        metafunc.parametrize("moment", moments, ids=[f"{moment:.0%}" for moment in moments])


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None and _figures.rows:
        output["faults"] = _figures.lines()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process that ran tests is done: takes over its lines."""
    _lines.extend(getattr(node, "workeroutput", {}).get("faults", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := _lines or (_figures.lines() if _figures.rows else []):
        terminalreporter.section(f"faults, seed {SEED}")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def some_cases(cases: list[Case]) -> list[Case]:
    """For faults that need no crowd."""
    return cases[:CASES]


@pytest.fixture
def figures() -> Figures:
    return _figures


@pytest.fixture(scope="session", params=["embedded", "external"] if LONG else ["embedded"])
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path
) -> Iterator[Pool]:
    """Four instances and two proxies."""
    options = ["--models", str(checkpoints_dir), "--device-memory", "64MiB", *INSTANCES, "--proxies", "2"]
    with shared("pool", __file__) as stack:
        directory = tmp_path_factory.mktemp(f"pool-{request.param}")
        yield stack.enter_context(opened(request.param, directory, cache, *options))


@pytest.fixture(autouse=True)
def _all_is_well_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared pool, all of it serves again, and all its memory is free."""
    yield
    if "pool" in request.fixturenames:
        server = request.getfixturevalue("pool").server
        server.wait_for_ready()
        server.wait_for_freed_memory()
        assert "Traceback" not in server.output()
