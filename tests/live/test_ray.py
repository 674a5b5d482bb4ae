"""Instances in a Ray cluster: one of the launcher's own, and one of two nodes, of which one dies and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.market import MARKET, RAY, Reference
from tests.live.server import ROOT, SPLIT, Server, eventually, launched, processes_of
from tests.live.streams import Body, Stream, run_all, until
from tests.ray_cluster import RayCluster, RayNode, of_ray, ray_cluster

MODELS = list(MARKET)[:2]
STREAMS = 12
TOKENS, FEW_TOKENS = 300, 100
GAP_S_MAX = 5.0  # that a client waits while a node dies: detection, and the rest
long = pytest.mark.skipif(not RAY, reason="takes a minute; make test-ray runs it")
_OPTIONS = ("--dtype", "float32", "--device-memory", "128MiB", "--host-memory", "256MiB", "--debug-memory")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes whose cache of weight images is not the launcher's; this thread is on the first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AEGIS_CACHE", str(tmp_path_factory.mktemp("nodes-cache")))
        patch.setenv("PYTHONPATH", str(ROOT))
        with ray_cluster() as running:
            patch.undo()
            with running.nodes[0].inside():
                yield running


def options(checkpoints: Path, address: str, *more: str) -> list[str]:
    models = [option for model in MODELS for option in ("--models", str(checkpoints / model))]
    return [*models, *_OPTIONS, *more, "--ray", address]


@contextmanager
def placed(
    cluster: RayCluster, directory: Path, cache: Path, checkpoints: Path, *more: str, finds_it: bool = False
) -> Iterator[Server]:
    """A server on the first node, beside this thread. It is told the cluster's address, or `finds_it`."""
    arguments = options(checkpoints, "auto" if finds_it else cluster.address, *more)
    with launched(directory, cache, *arguments, environment=of_ray(cluster)) as server:
        server.wait_for_ready()
        yield server


def bodies(tokens: int = TOKENS) -> list[Body]:
    """Of both models in turn; prompts fill blocks of KV to different degrees."""
    ends = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return [{"model": MODELS[n % 2], "prompt": [5 + n] * (1 + 17 * n)} | ends for n in range(STREAMS)]


def answers(streams: Sequence[Stream], tokens: int = TOKENS) -> list[list[int]]:
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert [len(stream.tokens) for stream in streams] == [tokens] * len(streams)
    return [stream.tokens for stream in streams]


@contextmanager
def come_back(cluster: RayCluster, node: RayNode) -> Iterator[None]:
    """Another raylet where one was killed."""
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
    command += ["--address", cluster.address, "--node-ip-address", node.ip, "--num-cpus", "8"]
    with node.inside():
        process = subprocess.Popen(
            [*command, "--object-store-memory", str(128 << 20), "--include-log-monitor", "false"],
            env=dict(cluster.environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


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


def test_more_than_the_cluster_has_is_refused_with_what_is_missing(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    arguments = options(checkpoints_dir, cluster.address, "--prefill", "9", "--decode", "9")
    with launched(tmp_path, cache, *arguments, environment=of_ray(cluster)) as server:
        assert server.process.wait(120) == 2
        (told,) = [line for line in server.output().splitlines() if line.startswith("aegis:")]
    assert "2 nodes" in told and "18 instances need 1 CPU each" in told and "room for 2 is missing" in told


def test_kv_is_handed_over_from_node_to_node_and_an_instance_that_dies_is_started_again(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    with placed(cluster, tmp_path, cache, checkpoints_dir, *SPLIT, "--proxies", "2", finds_it=True) as server:
        expected = answers(run_all(server.url, bodies(FEW_TOKENS)), FEW_TOKENS)
        assert server.metrics().total("instance_fetched_bytes_total") > 0, "one node prefills, the other decodes"

        async def kill_one(streams: Sequence[Stream]) -> None:
            await until(lambda: sum(len(stream.tokens) > 5 for stream in streams) > STREAMS // 2, "streams run")
            os.kill(_instance("decode-0", cluster), signal.SIGKILL)

        assert answers(run_all(server.url, bodies(FEW_TOKENS), kill_one), FEW_TOKENS) == expected
        server.wait_for_ready()
        server.wait_for_freed_memory()


@long
def test_a_node_that_dies_costs_a_moment_and_another_one_takes_its_place(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    with placed(cluster, tmp_path, cache, checkpoints_dir, "--mixed", "2") as server:
        expected = answers(run_all(server.url, bodies()))

        async def kill_node(streams: Sequence[Stream]) -> None:
            await until(lambda: sum(len(stream.tokens) > 5 for stream in streams) > STREAMS // 2, "streams run")
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
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is not ours
                continue
            if command[-2:-1] == [name.encode()] and ours in environment:
                return int(entry.name)
    raise AssertionError(f"{name} has no process")
