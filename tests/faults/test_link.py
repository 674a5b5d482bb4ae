"""The link between two hosts is cut while both serve: a node that nobody reaches is a node that died, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.live.processes.ray_server import GAP_S_MAX, answers, bodies, come_back, most_run, placed, two_nodes
from tests.live.server import eventually
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
