"""Children of a fork server are what `python -m` makes, but for what they need not import again."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from aegis.process import forked_processes
from aegis.process.forked_processes import ForkedProcess, ForkServer

WITHIN_S = 30.0
MODULES = {
    "imported": "import os\nPID = os.getpid()",
    "threaded": (
        "import os, threading, time\n"
        "PID = os.getpid()\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    ),
    "broken": "raise ValueError",
    "says": (
        "import os, sys, json, threading\n"
        "preloaded = [sys.modules[name].PID for name in ('imported', 'threaded') if name in sys.modules]\n"
        "leads = os.getpgid(0) == os.getpid()\n"
        "print(json.dumps([__name__, sys.argv[1:], sys.stdin.read(), os.environ['ADDED'], preloaded, leads]))\n"
    ),
    "ends": "import sys\nexec(sys.argv[1])",
    "lazy": (
        "had = []\n"
        "def __getattr__(name):\n"
        "    if name != 'PART':\n"
        "        raise AttributeError(name)\n"
        "    had.append(name)\n"
    ),
    "makes": (
        "import threading, time\n"
        "made = []\n"
        "def make(data): made.append(data.decode())\n"
        "def fail(data): raise ValueError\n"
        "def begin(data): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    ),
    "torch": "number = 0\ndef set_num_threads(count):\n    global number\n    number = count\n",
    "waits": "import signal\nprint('up', flush=True)\nsignal.pause()",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("modules")
    for name, program in MODULES.items():
        (directory / f"{name}.py").write_text(program)
    return {**os.environ, "PYTHONPATH": str(directory)}


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[ForkServer]:
    with closing(ForkServer(["broken", "imported", "lazy:MISSING", "lazy:PART"], environment)) as server:
        yield server


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(WITHIN_S):
            return await work

    return asyncio.run(main())


async def output(server: ForkServer, module: str, *arguments: str, **options: Any) -> tuple[int, str, str, int]:
    """Its exit code, what it wrote to standard output and error, and its process id."""
    out, err = os.memfd_create("out"), os.memfd_create("err")
    with os.fdopen(out, "r+") as out_file, os.fdopen(err, "r+") as err_file:
        options = {"environment": {"ADDED": "yes"}, "stdin": b""} | options
        process = await server.start(module, *arguments, stdout=out, stderr=err, **options)
        code = await process.wait()
        out_file.seek(0)
        err_file.seek(0)
        return code, out_file.read(), err_file.read(), process.pid


async def waiting(server: ForkServer) -> ForkedProcess:
    """A child that is up, and ends by a signal only."""
    readable, writable = os.pipe()
    with os.fdopen(readable, "rb") as told:
        process = await server.start("waits", environment={}, stdin=b"", stdout=writable)
        os.close(writable)
        assert await asyncio.to_thread(told.readline) == b"up\n"
    return process


def test_a_child_is_as_python_makes_it_and_has_what_was_imported(server: ForkServer) -> None:

    code, out, err, _ = run(output(server, "says", "a", "b c", stdin="é".encode()))
    assert (code, err) == (0, "")
    assert json.loads(out) == ["__main__", ["a", "b c"], "é", "yes", [server.pid], True]


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("import os; os._exit(4)", 4, ""),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("raise ValueError('what')", 1, "ValueError: what\n"),
    ],
)
def test_it_ends_as_any_program(server: ForkServer, program: str, code: int, said: str) -> None:
    ended, _, err, _ = run(output(server, "ends", program))
    assert ended == code
    assert err.endswith(said) and bool(err) == bool(said)


def test_a_named_part_of_a_module_was_asked_for_before(server: ForkServer) -> None:
    code, _, told, _ = run(output(server, "ends", "import lazy, sys; sys.exit(7 if lazy.had == ['PART'] else 1)"))
    assert code == 7, told


@pytest.mark.parametrize("told", ["1", "1,4", "many", ""])
def test_a_child_has_the_threads_that_its_environment_says(environment: dict[str, str], told: str) -> None:
    """As OpenMP reads it, also where it says nothing of use."""
    threads = 1 if told.startswith("1") else len(os.sched_getaffinity(0))
    with closing(ForkServer(["torch"], environment)) as server:
        options = {"environment": {"OMP_NUM_THREADS": told}}
        code, out, err, _ = run(output(server, "ends", "import torch; print(torch.number)", **options))
    assert (code, out, err) == (0, f"{threads}\n", "")


def test_children_have_what_was_prepared_before_they_were_started(environment: dict[str, str]) -> None:
    tell = "import makes, sys; sys.exit(''.join(makes.made))"

    async def work(server: ForkServer) -> list[str]:
        told = [(await output(server, "ends", tell))[2]]
        for function, data in (("makes:make", "é"), ("makes:fail", ""), ("makes:none", ""), ("none:make", "")):
            server.prepare(function, data.encode())
        server.prepare("makes:make", b"b" * (1 << 17))
        told.append((await output(server, "ends", tell))[2])
        server.prepare("makes:begin", b"")
        return [*told, (await output(server, "ends", tell))[2]]

    with closing(ForkServer(["imported"], environment)) as server:
        assert run(work(server)) == ["\n", "é" + "b" * (1 << 17) + "\n", "\n"], "one with a thread is not forked"
        server.close()
        server.prepare("makes:make", b"nobody does")


def test_many_are_started_at_once_and_each_is_killed_alone(server: ForkServer) -> None:
    async def main() -> list[int]:
        first, *others = await asyncio.gather(*(waiting(server) for _ in range(20)))
        assert len({process.pid for process in (first, *others)}) == 20
        first.kill()
        assert await first.wait() == -signal.SIGKILL
        first.kill()
        assert all(process.returncode is None for process in others)
        for process in others:
            process.kill()
        return list(await asyncio.gather(*(process.wait() for process in others)))

    assert run(main()) == [-signal.SIGKILL] * 19
    assert run(output(server, "ends", "pass"))[0] == 0, "on another event loop"


def test_if_it_is_killed_its_children_end_and_there_is_another(environment: dict[str, str]) -> None:
    async def main(server: ForkServer) -> None:
        children = [await waiting(server) for _ in range(3)]
        before = server.pid
        assert before
        os.kill(before, signal.SIGKILL)
        assert [await child.wait() for child in children] == [-signal.SIGKILL] * 3
        assert (await output(server, "ends", "pass"))[0] == 0
        assert server.pid != before

    with closing(ForkServer([], environment)) as server:
        run(main(server))


def test_the_end_of_a_child_is_seen_though_the_server_stands_still(environment: dict[str, str]) -> None:
    async def main(server: ForkServer) -> int:
        child = await waiting(server)
        assert server.pid
        os.kill(server.pid, signal.SIGSTOP)
        child.kill()
        return await child.wait()

    with closing(ForkServer([], environment)) as server:
        assert run(main(server)) == 255, "nobody could say the code"


def test_a_server_that_does_not_answer_is_replaced(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(server: ForkServer) -> None:
        child = await waiting(server)
        assert server.pid
        os.kill(server.pid, signal.SIGSTOP)
        monkeypatch.setattr(forked_processes, "START_S", 0.2)
        with pytest.raises(TimeoutError):
            await server.start("ends", "pass", environment={}, stdin=b"")
        monkeypatch.undo()
        assert await child.wait() == -signal.SIGKILL
        assert (await output(server, "ends", "pass"))[0] == 0

    with closing(ForkServer([], environment)) as server:
        run(main(server))


def test_a_start_that_is_given_up_leaves_no_child(server: ForkServer) -> None:
    async def main() -> None:
        readable, writable = os.pipe()
        with os.fdopen(readable, "rb") as told:
            starting = asyncio.create_task(server.start("waits", environment={}, stdin=b"", stdout=writable))
            await asyncio.sleep(0)
            starting.cancel()
            os.close(writable)
            await asyncio.to_thread(told.read)

    run(main())


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """In this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_of_which_nothing_can_be_known_is_not_started(server: ForkServer) -> None:
    """Its descriptor comes when too many files are open."""

    async def main() -> None:
        assert (await output(server, "ends", "pass"))[0] == 0
        readable, writable = os.pipe()
        with os.fdopen(readable, "rb") as told:
            starting = asyncio.create_task(server.start("waits", environment={}, stdin=b"", stdout=writable))
            await asyncio.sleep(0)
            os.close(writable)
            with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
                await starting
            assert await asyncio.to_thread(told.read) in (b"", b"up\n"), "it ends"
        before = server.pid
        assert (await output(server, "ends", "pass"))[0] == 0
        assert server.pid == before

    run(main())


def test_with_too_many_open_files_nothing_is_prepared(server: ForkServer) -> None:
    with no_descriptor_left():
        server.prepare("makes:make", b"nobody has it")
    assert run(output(server, "ends", "pass"))[0] == 0


@pytest.mark.parametrize("modules", [["threaded"], ["imported", "threaded"]])
def test_a_server_with_threads_forks_no_python(environment: dict[str, str], modules: Sequence[str]) -> None:
    """A lock that another thread held would be held for ever."""
    with closing(ForkServer(modules, environment)) as server:
        code, out, _, pid = run(output(server, "ends", "import threaded; print(threaded.PID)"))
        assert (code, int(out)) == (0, pid)


def test_closing_ends_it_and_what_is_left(environment: dict[str, str]) -> None:
    async def main() -> int:
        with closing(ForkServer([], environment)) as server:
            child = await waiting(server)
            pid = server.pid
            assert pid
        assert not Path(f"/proc/{pid}").exists()
        return await child.wait()

    assert run(main()) == -signal.SIGKILL
