"""The link between two hosts is cut while both serve: a node that nobody reaches is a node that died, and ends. So is
an instance one of whose connections is reset."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.live.processes.ray_server import (
    GAP_S_MAX,
    answers,
    bodies,
    come_back,
    most_run,
    options,
    placed,
    two_nodes,
)
from tests.live.server import eventually, launched
from tests.live.streams import Stream, run_all, until
from tests.ray_cluster import RayCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    directory = tmp_path / "nodes-cache"
    directory.mkdir()
    with two_nodes(directory) as running:
        if not running.has_cable:
            pytest.skip("there is no cable to cut: network namespaces need root")
        yield running


@pytest.mark.long
def test_a_link_that_is_cut_costs_a_moment(
    cluster: RayCluster, tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    with placed(cluster, tmp_path, cache, checkpoints_dir, "--mixed", "2") as server:
        expected = answers(run_all(server.url, bodies()))

        async def cut(streams: Sequence[Stream]) -> None:
            await until(lambda: most_run(streams), "streams run")
            await asyncio.to_thread(cluster.cut)

        streams = run_all(server.url, bodies(), cut)
        assert answers(streams) == expected
        assert max(stream.longest_gap_s for stream in streams) < GAP_S_MAX
        assert not server.ready()
        assert answers(run_all(server.url, bodies())) == expected
        cluster.mend()
        eventually(lambda: cluster.nodes[1].process.poll() is not None, "Ray ends a node that it has given up")
        cluster.nodes[1].kill()
        with come_back(cluster, cluster.nodes[1]):
            eventually(server.ready, "the instances are placed again")
            assert answers(run_all(server.url, bodies())) == expected
            server.wait_for_freed_memory()


@pytest.mark.long
@pytest.mark.parametrize("whose", [0, 1], ids=["the launcher's", "a proxy's"])
def test_a_connection_that_is_reset_costs_a_moment(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, whose: int
) -> None:
    """The instance has one to the launcher, and then one to each proxy."""
    if not shutil.which("ss"):
        pytest.skip("no ss, which resets connections")
    with launched(tmp_path, cache, *options(checkpoints_dir, "local", "--mixed", "2")) as server:
        server.wait_for_ready()
        expected = answers(run_all(server.url, bodies()))
        pid = server.pid_of("mixed-0")

        async def reset(streams: Sequence[Stream]) -> None:
            await until(lambda: most_run(streams), "streams run")
            await asyncio.to_thread(_reset, _ports(pid)[whose])

        assert answers(run_all(server.url, bodies(), reset)) == expected
        eventually(lambda: "mixed-0 (pid" in server.output(), "the instance ends")
        eventually(lambda: server.ready() and server.pid_of("mixed-0") != pid, "another one takes its place")
        assert answers(run_all(server.url, bodies())) == expected
        server.wait_for_freed_memory()
        assert server.output().count("ended with code 3") == 1, "and none when the server ends"
        assert server.stop() == 0
        assert server.output().count("ended with code") == 1


def _ports(pid: int) -> list[int]:
    """This process's own, of the connections that it has, in the order in which it has made them."""
    listed = subprocess.run(["ss", "-Htnp", "state", "established"], capture_output=True, text=True, check=True)
    found = re.findall(rf"^\d+ +\d+ +\S+:(\d+) .*,pid={pid},fd=(\d+)", listed.stdout, re.MULTILINE)
    return [int(port) for port, _ in sorted(found, key=lambda each: int(each[1]))]


def _reset(port: int) -> None:
    subprocess.run(["ss", "-K", "-t", "sport", "=", f":{port}"], capture_output=True, check=True)
