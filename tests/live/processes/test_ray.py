"""Instances in a Ray cluster: one of the launcher's own, and one of two nodes, of which one dies and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.live.ctl import ctl
from tests.live.market import RAY, Reference
from tests.live.processes.moving import check_moves
from tests.live.processes.ray_server import (
    FEW_TOKENS,
    GAP_S_MAX,
    MODELS,
    answers,
    bodies,
    come_back,
    most_run,
    options,
    placed,
    two_nodes,
)
from tests.live.server import SPLIT, eventually, launched, processes_of
from tests.live.streams import Stream, run_all, until
from tests.ray_cluster import RayCluster, of_ray

pytestmark = pytest.mark.long

long = pytest.mark.skipif(not RAY, reason="takes a minute; make test-ray runs it")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with two_nodes(tmp_path_factory.mktemp("nodes-cache")) as running:
        yield running


@long
def test_a_cluster_of_its_own_serves_and_ends_with_the_server(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, references: dict[str, Reference]
) -> None:
    with launched(tmp_path, cache, *options(checkpoints_dir, "local", *SPLIT)) as server:
        server.wait_for_ready()
        assert any("raylet" in command for command in processes_of(server.process.pid).values())
        body = {"model": MODELS[0], "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        (stream,) = run_all(server.url, [body])
        assert stream.tokens == references[MODELS[0]].greedy([5, 6, 7], max_tokens=20, ignore_eos=True).tokens
        server.wait_for_freed_memory()
        assert server.stop() == 0


@pytest.mark.long
def test_more_than_the_cluster_has_is_refused_with_what_is_missing(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    arguments = options(checkpoints_dir, cluster.address, "--prefill", "9", "--decode", "9")
    with launched(tmp_path, cache, *arguments, environment=of_ray(cluster)) as server:
        assert server.process.wait(120) == 2
        (told,) = [line for line in server.output().splitlines() if line.startswith("aegis:")]
    assert "2 nodes" in told and "each of 18 instances needs 1 CPU" in told and "room for 2 is missing" in told


def test_kv_is_handed_over_from_node_to_node_and_an_instance_that_dies_is_started_again(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    with placed(cluster, tmp_path, cache, checkpoints_dir, *SPLIT, "--proxies", "2", finds_it=True) as server:
        expected = answers(run_all(server.url, bodies(FEW_TOKENS)), FEW_TOKENS)
        assert server.metrics().total("instance_fetched_bytes_total") > 0, "one node prefills, the other decodes"

        async def kill_one(streams: Sequence[Stream]) -> None:
            await until(lambda: most_run(streams), "streams run")
            os.kill(_instance("decode-0", cluster), signal.SIGKILL)

        assert answers(run_all(server.url, bodies(FEW_TOKENS), kill_one), FEW_TOKENS) == expected
        server.wait_for_ready()
        server.wait_for_freed_memory()


@long
def test_an_instance_joins_where_the_cluster_has_room_and_gives_it_back(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    with placed(cluster, tmp_path, cache, checkpoints_dir, *SPLIT) as server:
        expected = answers(run_all(server.url, bodies(FEW_TOKENS)), FEW_TOKENS)
        replies: list[subprocess.CompletedProcess[str]] = []

        async def grow(streams: Sequence[Stream]) -> None:
            await until(lambda: most_run(streams), "streams run")
            replies.append(await asyncio.to_thread(ctl, server, "add", "--role", "decode", "--count", "2"))

        assert answers(run_all(server.url, bodies(FEW_TOKENS), grow), FEW_TOKENS) == expected
        assert (replies[0].stdout, replies[0].stderr) == ("decode-1, decode-2 serve\n", "")
        refused = ctl(server, "add", "--role", "decode", "--count", "13")
        assert refused.returncode == 1
        assert "2 nodes" in refused.stderr and "room for 1 is missing" in refused.stderr
        assert sorted(server.get("/debug/node").json()["instances"]) == [
            "decode-0",
            "decode-1",
            "decode-2",
            "prefill-0",
        ]

        async def shrink(streams: Sequence[Stream]) -> None:
            await until(lambda: most_run(streams), "streams run")
            for name in ("decode-0", "decode-2"):
                replies.append(await asyncio.to_thread(ctl, server, "remove", name))

        assert answers(run_all(server.url, bodies(FEW_TOKENS), shrink), FEW_TOKENS) == expected
        assert [reply.stdout for reply in replies[1:]] == ["decode-0 is removed\n", "decode-2 is removed\n"]
        added = ctl(server, "add", "--role", "decode", "--count", "2")
        assert added.returncode == 0, added.stderr
        assert answers(run_all(server.url, bodies(FEW_TOKENS)), FEW_TOKENS) == expected
        server.wait_for_freed_memory()


@long
def test_a_model_moves_with_its_streams_from_node_to_node(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    with placed(cluster, tmp_path, cache, checkpoints_dir, "--mixed", "2") as server:
        check_moves(server)
        assert server.metrics().total("instance_fetched_bytes_total") > 0, "KV goes from node to node"


@long
def test_a_node_that_dies_costs_a_moment_and_another_one_takes_its_place(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    with placed(cluster, tmp_path, cache, checkpoints_dir, "--mixed", "2") as server:
        expected = answers(run_all(server.url, bodies()))

        async def kill_node(streams: Sequence[Stream]) -> None:
            await until(lambda: most_run(streams), "streams run")
            await asyncio.to_thread(cluster.nodes[1].kill)

        streams = run_all(server.url, bodies(), kill_node)
        assert answers(streams) == expected
        assert max(stream.longest_gap_s for stream in streams) < GAP_S_MAX
        assert not server.ready()
        with come_back(cluster, cluster.nodes[1]):
            eventually(server.ready, "the instances are placed again")
            assert answers(run_all(server.url, bodies())) == expected
            server.wait_for_freed_memory()


def _instance(name: str, cluster: RayCluster) -> int:
    """The process of the instance, on whichever node."""
    ours = f"RAY_TMPDIR={cluster.environment['RAY_TMPDIR']}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().strip(b"\0").split(b" ")
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                environment = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is not ours
                continue
            if command[-1:] == [name.encode()] and ours in environment:
                return int(entry.name)
    raise AssertionError(f"{name} has no process")
