"""A registrar that does nothing, or ends, costs the source it was at; one that nobody wants any more is ended."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.sources import Source
from aegis.models.terms import Terms
from aegis.node.registration import RegistrationCancelled, register
from aegis.process.forked_processes import ForkedProcess, ForkServer

REGISTRAR = """
import json, os, sys, time
for line in sys.stdin:
    model = json.loads(line)["source"]["model"]
    def say(**what): print(json.dumps({"model": model} | what), flush=True)
    say(type="Progress", text="loading the weights", within_s=0.3 if model == "stands still" else 60)
    if model in ("stands still", "takes long"): time.sleep(60)
    if model == "dies": os._exit(1)
    say(type="Refused", reason="was read")
"""
SILENT = "import time; time.sleep(60)"
LINGERING = f"{REGISTRAR}\ntime.sleep(60)"
NOISY = f"import sys; sys.stderr.write('é' * 100_000)\n{REGISTRAR}"
WITHIN_S = 20.0
Became = list[tuple[str, str, int]]


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """It finds the registrars of these tests."""
    directory = tmp_path_factory.mktemp("registrars")
    for name, program in (("registrar", REGISTRAR), ("silent", SILENT), ("lingering", LINGERING), ("noisy", NOISY)):
        (directory / f"{name}.py").write_text(program)
    with closing(ForkServer([], {**os.environ, "PYTHONPATH": str(directory)})) as server:
        yield server


def registered(
    fork_server: ForkServer,
    *models: str,
    module: str = "registrar",
    start_s: float = 30.0,
    unwanted: RegistrationCancelled | None = None,
    leave: str = "",
) -> Became:
    """What became of each. `leave` becomes unwanted when it is begun."""
    unwanted = unwanted or RegistrationCancelled()

    def report(model: ModelId, text: str) -> None:
        if model == leave:
            unwanted.add(model)

    async def main() -> Became:
        outcomes = register(
            [Source(ModelId(model), path=f"/{model}") for model in models],
            Terms("/nowhere", "auto", limit_bytes=1),
            report=report,
            unwanted=unwanted,
            start_s=start_s,
            fork_server=fork_server,
            module=module,
        )
        async with asyncio.timeout(WITHIN_S):
            return [(source.model, *_told(outcome)) async for source, outcome in outcomes]

    return asyncio.run(main())


def _told(outcome: ModelSpec | ModelRefused) -> tuple[str, int]:
    assert isinstance(outcome, ModelRefused)
    return outcome.message, outcome.status


READ = ("was read", 400)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("stands still", "/stands still: loading the weights took more than 0 s; it was given up"),
        ("dies", "/dies: the process that read it ended abruptly while loading the weights (out of memory?)"),
    ],
)
def test_the_source_it_was_at_is_refused_and_the_others_are_registered(
    fork_server: ForkServer, model: str, said: str
) -> None:
    assert registered(fork_server, "a", model, "b") == [("a", *READ), (model, said, 400), ("b", *READ)]


def test_what_a_registrar_writes_to_the_log_goes_through_the_one_that_keeps_nobody_waiting(
    fork_server: ForkServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert registered(fork_server, "a", module="noisy") == [("a", *READ)]
    assert capsys.readouterr().err == "é" * 100_000


def test_a_registrar_that_never_begins_is_given_up_for_each_source(fork_server: ForkServer) -> None:
    said = "starting took more than 0 s; it was given up"
    assert registered(fork_server, "a", "b", module="silent", start_s=0.2) == [
        ("a", f"/a: {said}", 400),
        ("b", f"/b: {said}", 400),
    ]


def test_a_registrar_that_has_said_all_and_does_not_end_costs_nothing(fork_server: ForkServer) -> None:
    assert registered(fork_server, "a", module="lingering", start_s=4.0) == [("a", *READ)]


class _Lacking(ForkServer):
    """The first of its starts fail, each with one of `errors`."""

    def __init__(self, server: ForkServer, *errors: OSError) -> None:
        self._server = server
        self._errors = [*errors]

    async def start(self, module: str, *arguments: str, **options: Any) -> ForkedProcess:
        if self._errors:
            raise self._errors.pop(0)
        return await self._server.start(module, *arguments, **options)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (ConnectionResetError("the process that starts others ended"), "the process that starts others ended"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_registrar_that_cannot_be_started_costs_one_source(
    fork_server: ForkServer, error: OSError, reason: str
) -> None:
    refusal = f"/a: its registrar cannot be started: {reason}"
    assert registered(_Lacking(fork_server, error), "a", "b") == [("a", refusal, 503), ("b", *READ)]


def test_so_does_one_for_which_there_are_no_pipes(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, left = os.pipe, [OSError(errno.EMFILE, "Too many open files")]

    def lacking() -> tuple[int, int]:
        if left:
            raise left.pop()
        return pipe()

    monkeypatch.setattr(os, "pipe", lacking)
    refusal = "/a: its registrar cannot be started: Too many open files"
    assert registered(fork_server, "a", "b") == [("a", refusal, 503), ("b", *READ)]


def test_what_is_not_wanted_any_more_is_ended_and_the_others_are_registered(fork_server: ForkServer) -> None:
    began_s = time.monotonic()
    became = registered(fork_server, "a", "takes long", "b", leave="takes long")
    assert became == [
        ("a", *READ),
        ("takes long", "'takes long' was unloaded while it was registered", 409),
        ("b", *READ),
    ]
    assert time.monotonic() - began_s < WITHIN_S


def test_what_is_not_wanted_from_the_start_is_not_begun(fork_server: ForkServer) -> None:
    unwanted = RegistrationCancelled()
    unwanted.add(ModelId("takes long"))
    assert [model for model, *_ in registered(fork_server, "takes long", "a", unwanted=unwanted)] == ["takes long", "a"]


def test_what_became_unwanted_while_another_waits_is_taken_out(fork_server: ForkServer) -> None:
    """The registrar is at the first; the second is not begun."""

    async def main(models: Sequence[str]) -> list[str]:
        unwanted, order = RegistrationCancelled(), list[str]()
        asked = [Source(ModelId(model), path="/x") for model in models]
        outcomes = register(
            asked,
            Terms("/nowhere", "auto", limit_bytes=1),
            report=lambda model, _: unwanted.add(ModelId("takes long")) if model == "a" else None,
            unwanted=unwanted,
            fork_server=fork_server,
            module="registrar",
        )
        async with asyncio.timeout(WITHIN_S):
            async for source, outcome in outcomes:
                order.append(f"{source.model} {_told(outcome)[1]}")
        return sorted(order)

    assert asyncio.run(main(["a", "takes long", "b"])) == ["a 400", "b 400", "takes long 409"]
