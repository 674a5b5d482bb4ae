"""The demo market: eight tiny models to try aegis with, made here and kept in the cache directory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.models.cache import default_cache_dir, locked, made, replacing
from aegis.models.demo.recipes import RECIPES, STEPS, edition
from aegis.models.failures import one_line
from aegis.models.sources import Source, is_checkpoint

WORKERS = 2
"""So many models are made at a time."""


def demo_models(cache_dir: Path, *, slo: Slo = Slo()) -> list[Source]:  # noqa: B008
    """The places of the market's models once `make_market` has returned."""
    return [Source(ModelId(name), path=str(_market(cache_dir) / name), slo=slo) for name in RECIPES]


def missing_models(cache_dir: Path) -> list[str]:
    """The models of the market that are still to be made, in its order."""
    return [name for name in RECIPES if not is_checkpoint(_market(cache_dir) / name)]


def make_market(cache_dir: Path | None = None, only: Collection[str] = tuple(RECIPES)) -> None:
    """Trains the models that are missing, in two processes, and shows how far it is.

    A model appears in the cache whole or not at all: an interrupted run goes on where it was. Of two runs at a time
    the second waits for the first and finds nothing left to do. Raises UserError if they cannot be made, or if
    one of `only` is none of the market's.
    """
    for name in only:
        if name not in RECIPES:
            raise UserError(f"'{name}' is none of the demo market's models, which are {', '.join(RECIPES)}")
    cache_dir = made(cache_dir or default_cache_dir())
    market = _market(cache_dir)
    try:
        with locked(market):
            missing = [name for name in missing_models(cache_dir) if name in only]
            if missing:
                market.mkdir(exist_ok=True)
                _make(missing, market)
    except OSError as error:
        raise _not_made(market, _why(error)) from error


def _market(cache_dir: Path) -> Path:
    return cache_dir / "demo" / edition()


def _make(missing: Sequence[str], market: Path) -> None:
    shares = [share for nth in range(WORKERS) if (share := missing[nth::WORKERS])]
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:  # where a bar would be shown once, at its end
        console.print(f"making the demo market: {', '.join(missing)}", soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[names]}"), TimeElapsedColumn())
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        bar = progress.add_task("Making the demo market", total=len(missing) * STEPS, names="")
        running = dict(_start(share, market, stack) for share in shares)
        working_on: dict[Connection, str] = {}
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                try:
                    working_on[ready], reason = ready.recv()
                    if reason:
                        raise _not_made(market, reason)
                    progress.update(bar, advance=1, names=", ".join(sorted(working_on.values())))
                except EOFError:
                    _check_ended(running.pop(ready), market)


def _start(names: Sequence[str], market: Path, stack: ExitStack) -> tuple[Connection, BaseProcess]:
    spawn = get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(list(names), market, sending), daemon=True)
    process.start()
    sending.close()
    stack.callback(process.join)
    stack.callback(process.terminate)
    return receiving, process


def _check_ended(process: BaseProcess, market: Path) -> None:
    """Raises UserError for a process that could not say why it ended."""
    process.join()
    if process.exitcode:
        raise _not_made(market, f"a process ended with code {process.exitcode}")


def _not_made(market: Path, reason: str) -> UserError:
    message = f"the demo market cannot be made in {market}: {reason}; what is done is kept: start again to go on"
    return UserError(message)


def _why(error: Exception) -> str:
    """Short, for a log cuts what is long; where it was is said anyway."""
    return (isinstance(error, OSError) and error.strerror) or one_line(error)


def _work(names: Sequence[str], market: Path, progress: Connection) -> None:
    """In a process of its own; sends a model's name for every step of its training, with the reason if it cannot be
    made."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from aegis.models.demo.training import make_model

    torch.set_num_threads(1)
    for name in names:
        try:
            with replacing(market / name) as draft:
                make_model(name, draft, report=partial(progress.send, (name, "")))
        except Exception as error:
            progress.send((name, f"{name}: {_why(error)}"))
            if not isinstance(error, OSError | SafetensorError):  # a full disk is no bug
                raise
            sys.exit(1)


def _end_with_parent() -> None:
    """A parent that is killed does not end its child, and the pipe to it breaks only when a step of training is
    reported."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
