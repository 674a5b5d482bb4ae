from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from aegis.core.errors import UserError
from aegis.core.messages import AddModel, DropModel, SetSlo
from aegis.core.model import ModelSpec, Slo
from aegis.instance.model_binder import ModelBinder
from tests.unit.proxy.http.scripted import spec

WAIT_S = 10


class Part:
    """Prepares when it may; remembers what it did. A spec of the name `bad` is refused."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.begun = threading.Event()
        self.done: list[tuple[str, str]] = []

    def prepare(self, spec: ModelSpec) -> None:
        self.begun.set()
        assert self.may.wait(WAIT_S)
        if spec.model == "bad":
            raise UserError("no")
        self.done.append(("prepared", spec.manifest.fingerprint))

    def discard(self, spec: ModelSpec) -> None:
        self.done.append(("discarded", spec.manifest.fingerprint))


@pytest.fixture
def parts() -> list[Part]:
    return [Part(), Part()]


@pytest.fixture
def binder(parts: list[Part]) -> Iterator[ModelBinder]:
    binder = ModelBinder(*parts)
    yield binder
    for part in parts:
        part.may.set()
    binder.close()


def ready(binder: ModelBinder, parts: list[Part], count: int) -> list[AddModel]:
    """All that is being prepared, let go of."""
    for part in parts:
        part.may.set()
    for future, _ in [*binder._building]:
        future.result(WAIT_S)
    found = binder.ready()
    assert len(found) == count
    return found


def test_an_idle_instance_binds_at_once(binder: ModelBinder) -> None:
    assert not binder.defer(AddModel(spec("a")), busy=False)
    assert binder.ready() == []


def test_beside_steps_models_come_when_all_parts_are_ready_and_in_order(binder: ModelBinder, parts: list[Part]) -> None:
    added = [AddModel(spec(name)) for name in ("a", "bad", "b")]
    assert all(binder.defer(event, busy=event is added[0]) for event in added)
    assert binder.ready() == []
    assert ready(binder, parts, 3) == added
    assert [part.done for part in parts] == [[("prepared", "a"), ("prepared", "b")]] * 2


def test_what_is_dropped_while_it_is_prepared_is_discarded_and_never_comes(
    binder: ModelBinder, parts: list[Part]
) -> None:
    for name in ("a", "b", "c"):
        assert binder.defer(AddModel(spec(name)), busy=True)
    assert parts[0].begun.wait(WAIT_S)
    for name in ("a", "b"):
        assert not binder.defer(DropModel(spec(name).model), busy=True)
    assert [event.spec.model for event in ready(binder, parts, 1)] == ["c"]
    binder.close()
    for part in parts:
        assert {entry for entry in part.done if entry[1] != "c"} == {("prepared", "a"), ("discarded", "a")}


def test_deadlines_that_change_while_it_is_prepared_come_with_it(binder: ModelBinder, parts: list[Part]) -> None:
    for name in ("a", "b"):
        assert binder.defer(AddModel(spec(name)), busy=True)
    assert not binder.defer(SetSlo(spec("b").model, Slo(7, 8)), busy=True)
    assert [event.spec.slo for event in ready(binder, parts, 2)] == [spec("a").slo, Slo(7, 8)]
