"""Servers that several files share end with the last test that uses them, not with the run: even an idle one takes a
fortieth of a processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.schedule import ROOT, SHARING, group_of

Shared = tuple[str, Path]
"""A fixture, and the directory of the tests for which it is this one."""

_open: list[tuple[Shared, ExitStack]] = []
_places: dict[str, int] = {}
_last: dict[Shared, int] = {}


@contextmanager
def shared(fixture: str, conftest: str) -> Iterator[ExitStack]:
    """What is entered into the stack ends after the last test that uses the fixture of this file, directly or not."""
    assert fixture in SHARING
    with ExitStack() as stack:
        _open.append(((fixture, Path(conftest).parent), stack))
        yield stack


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    for place, item in enumerate(session.items):
        _places[item.nodeid] = place
        group = group_of(item.path.relative_to(ROOT).as_posix())  # where fixtures are asked for as a test runs
        asked = SHARING.keys() & getattr(item, "fixturenames", ())
        for fixture in asked | {group} if group else asked:
            _last.update(((fixture, directory), place) for directory in item.path.parents)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests are handed out in the order in which they were collected: after the last one there is none for this process
    either."""
    for what, stack in reversed(_open):
        if _last.get(what, len(_places)) < _places[item.nodeid]:
            _open.remove((what, stack))
            stack.close()
