"""Garbage is looked for seldom, and still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from aegis.process import garbage_collection


@pytest.fixture
def collect_seldom() -> Iterator[None]:
    before = gc.get_threshold()
    garbage_collection.collect_seldom()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Knot:
    def __init__(self) -> None:
        self.self = self


@pytest.mark.usefixtures("collect_seldom")
def test_what_is_alive_is_not_looked_through_again_and_new_cycles_are_found() -> None:
    assert gc.get_freeze_count() > 0
    knot = weakref.ref(Knot())
    kept = [[] for _ in range(2 * gc.get_threshold()[0])]
    assert knot() is None and kept


@pytest.mark.usefixtures("collect_seldom")
def test_all_is_looked_through_when_nobody_waits() -> None:
    knots = [Knot()]
    gone = weakref.ref(knots[0])
    gc.collect(1)  # it is old now
    knots.clear()
    garbage_collection.collect_while_idle()
    assert gone() is not None  # too little has come since for that
    kept: list[list[None]] = []
    while gc.get_count()[2] < 10:
        kept.append([])
    garbage_collection.collect_while_idle()
    assert gone() is None
