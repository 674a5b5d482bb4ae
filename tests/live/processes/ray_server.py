"""A server whose instances are in a Ray cluster of two nodes: two models, small prompts, exact answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.market import MARKET
from tests.live.server import ROOT, Server, launched, processes_of
from tests.live.streams import Body, Stream
from tests.ray_cluster import RayCluster, RayNode, of_ray, ray_cluster

MODELS = list(MARKET)[:2]
STREAMS = 12
TOKENS, FEW_TOKENS = 300, 100
GAP_S_MAX = 5.0  # that a client waits while a node dies: detection, and the rest
_OPTIONS = ("--dtype", "float32", "--device-memory", "128MiB", "--host-memory", "256MiB", "--debug-memory")


@contextmanager
def two_nodes(directory: Path) -> Iterator[RayCluster]:
    """Their cache of weight images is not the launcher's; this thread is on the first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AEGIS_CACHE", str(directory))
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


def most_run(streams: Sequence[Stream]) -> bool:
    """The moment to strike."""
    return sum(len(stream.tokens) > 5 for stream in streams) > STREAMS // 2
