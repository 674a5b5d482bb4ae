"""The MQTT bus of a running server: what is ordered is done, and streams do not notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests import brokers
from tests.brokers import Broker
from tests.live.ctl import Done, ctl, while_streams_run
from tests.live.market import MARKET
from tests.live.server import Server, eventually, launched
from tests.live.streams import Body, Stream, drawn_bodies, run_all

STREAMS = 16
MAX_TOKENS = 140
FIRST, SECOND = "mixed-0", "mixed-1"
MODEL = next(iter(MARKET))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A server with its broker, which is the server's own if `broker` is None."""

    server: Server
    broker: Broker | None

    def ctl(self, *words: str) -> Done:
        return ctl(self.server, *words, mqtt=self.broker.url if self.broker else None)


@pytest.fixture(scope="module", params=[pytest.param("embedded", marks=pytest.mark.long), "mosquitto"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp(f"bus-{request.param}")
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", "96MiB", "--mixed", "2"]
    with ExitStack() as stack:
        broker = None
        if request.param != "embedded":
            broker = stack.enter_context(brokers.running(request.param, directory / "broker"))
            options += ["--mqtt", broker.url]
        server = stack.enter_context(launched(directory, cache, *options, "--debug-memory"))
        server.wait_for_ready()
        yield Cluster(server, broker)


def _bodies() -> list[Body]:
    return drawn_bodies("bus", list(MARKET), STREAMS, MAX_TOKENS)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[list[int]]:
    streams = run_all(cluster.server.url, _bodies())
    assert [len(stream.tokens) for stream in streams] == [MAX_TOKENS] * STREAMS
    return [stream.tokens for stream in streams]


def _while_streams_run(cluster: Cluster, undisturbed: list[list[int]], *words: str) -> Done:
    order = partial(cluster.ctl, *words)
    return while_streams_run(order, cluster.server.url, _bodies(), undisturbed, tokens=10 * STREAMS)


def _exact(streams: Sequence[Stream], undisturbed: list[list[int]]) -> None:
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert [stream.tokens for stream in streams] == undisturbed
    assert all(stream.done for stream in streams)


@pytest.mark.long
def test_a_drained_instance_hands_its_streams_on(cluster: Cluster, undisturbed: list[list[int]]) -> None:
    server = cluster.server
    answer = _while_streams_run(cluster, undisturbed, "drain", SECOND)
    assert (answer.returncode, answer.stdout) == (0, f"{SECOND} is drained\n")
    assert server.ready()
    last = cluster.ctl("drain", FIRST)
    assert (last.returncode, last.stderr) == (1, f"aegis: {FIRST} is the last one; nobody would serve any more\n")
    assert cluster.ctl("resume", SECOND).returncode == 0
    eventually(lambda: server.metrics().total("instance_up", instance=SECOND) == 1, "it serves again")
    assert server.ready() and server.pid_of(SECOND)


def _pinned(server: Server) -> set[str]:
    return {image["model"] for image in server.get("/debug/memory").json()["model_cache"]["images"] if image["pinned"]}


def test_what_is_ordered_is_done(cluster: Cluster) -> None:
    server = cluster.server
    assert cluster.ctl("pin", FIRST, MODEL).stdout == f"{MODEL} is pinned in the model cache\n"
    assert _pinned(server) == {MODEL}
    assert cluster.ctl("unpin", FIRST, MODEL).returncode == 0
    assert _pinned(server) == set()
    assert cluster.ctl("load", FIRST, MODEL).stdout == f"{MODEL} is in the model cache\n"
    assert cluster.ctl("limit", FIRST, "64MiB").stdout.startswith(f"{FIRST} may hold 64MiB; it gave back ")
    assert cluster.ctl("limit", FIRST, "1GiB").returncode == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("pin", FIRST, "nobody"), "there is no model named 'nobody'"),
        (("drain", "mixed-9"), f"there is no instance named 'mixed-9', only {FIRST}, {SECOND}"),
        (("role", FIRST, "prefill"), "the pool would have mixed, prefill instances alone"),
        (("limit", FIRST, "2MiB"), f"{FIRST} needs at least"),
        (("resume", FIRST), f"{FIRST} is not drained"),
    ],
)
def test_what_cannot_be_done_is_refused(cluster: Cluster, words: tuple[str, ...], why: str) -> None:
    done = cluster.ctl(*words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"aegis: {why}")
    assert done.stdout == ""


@pytest.mark.long
def test_an_instance_changes_its_role_while_it_serves(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--prefill", "2", "--decode", "1"]
    with launched(tmp_path, cache, *options, "--debug-memory") as server:
        server.wait_for_ready()
        cluster = Cluster(server, None)
        undisturbed = [stream.tokens for stream in run_all(server.url, _bodies())]
        answer = _while_streams_run(cluster, undisturbed, "role", "prefill-1", "decode")
        assert (answer.returncode, answer.stdout) == (0, "prefill-1 is decode\n")
        assert server.get("/debug/node").json()["instances"]["prefill-1"] == "decode"
        assert cluster.ctl("role", "prefill-0", "decode").returncode == 1
        _exact(run_all(server.url, _bodies()), undisturbed)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://me:s3cret@broker", "--mqtt: should begin with mqtt://"),
        ("mqtt://me:s3cret@127.0.0.1:1", "no MQTT broker answers at mqtt://127.0.0.1:1"),
    ],
)
def test_a_broker_that_cannot_be_used_is_one_line(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, url: str, why: str
) -> None:
    with launched(tmp_path, cache, "--models", str(checkpoints_dir), "--mqtt", url) as server:
        assert server.process.wait(60) == 2
    assert why in server.output()
    assert "s3cret" not in server.output()
    assert "Traceback" not in server.output()
