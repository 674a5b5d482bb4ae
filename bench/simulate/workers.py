"""Many simulations at a time, each in one of some processes, with a bar that says how far they are."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aegis.core.errors import UserError
from aegis.process.child import end_with_launcher

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def each(work: Callable[[_Task], _Result], tasks: Sequence[_Task], *, jobs: int, title: str) -> list[_Result]:
    """`work` of each task, in their order. `work` and `tasks` have to be such as another process can be told.

    Raises the UserError that one of them raised, or one where a process was killed; the others are stopped.
    """
    results = dict(as_they_come(work, tasks, jobs=jobs, title=title))
    return [results[index] for index in range(len(tasks))]


def as_they_come(
    work: Callable[[_Task], _Result], tasks: Sequence[_Task], *, jobs: int, title: str
) -> Iterator[tuple[int, _Result]]:
    """The results as they come, each with the number of its task."""
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from _shown(enumerate(map(work, tasks)), len(tasks), title)
        return
    with _helpers(work, jobs) as helpers:
        yield from _shown(_answers(helpers, tasks), len(tasks), title)


def _shown(results: Iterable[_Result], total: int, title: str) -> Iterator[_Result]:
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(results, total=total)


@contextmanager
def _helpers(work: Callable[[Any], Any], count: int) -> Iterator[list[Connection]]:
    """Processes that answer tasks; whatever happens, they do not outlive the block."""
    context = get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_help, args=(work, theirs), daemon=True)
            with _without_interrupts():
                process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield connections
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C reaches the whole group: a process that is started within this context ignores it from the first moment,
    and is ended by us."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _help(work: Callable[[Any], Any], tasks: Connection) -> None:
    """Answers tasks until none comes any more; a simulation that nobody waits for any more may last for hours."""
    end_with_launcher()
    while True:
        try:
            index, task = tasks.recv()
        except EOFError:
            return
        try:
            tasks.send((index, work(task)))
        except UserError as error:
            tasks.send((None, error))
        except Exception:  # noqa: BLE001 - a bug of ours, of which the other side says what it is
            traceback.print_exc()
            tasks.send((None, UserError("a simulation broke, which it should not; the error is above")))


def _answers(helpers: Sequence[Connection], tasks: Sequence[_Task]) -> Iterator[tuple[int, Any]]:
    """The answers as they come, each with the number of its task."""
    waiting = iter(enumerate(tasks))
    for helper in helpers:
        helper.send(next(waiting))
    for _ in tasks:
        helper = next(ready for ready in wait(helpers) if isinstance(ready, Connection))
        try:
            index, answer = helper.recv()
        except (EOFError, ConnectionError):
            raise UserError("a simulation was ended from outside, perhaps for lack of memory; try --jobs 1") from None
        if index is None:
            raise answer
        if (task := next(waiting, None)) is not None:
            helper.send(task)
        yield index, answer
