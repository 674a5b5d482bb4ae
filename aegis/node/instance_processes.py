"""The processes of one instance, one for each of its ranks, forked from one that has imported what they need."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

import msgspec

from aegis.core.model import EngineName, ModelSpec
from aegis.instance.settings import InstanceSettings
from aegis.process.forked_processes import ForkedProcess, ForkServer


class Processes:
    """Running. `pid` is the first rank's."""

    def __init__(self, ranks: Sequence[ForkedProcess]) -> None:
        self._ranks = ranks
        self.pid = ranks[0].pid

    def kill(self) -> None:
        """All of them: the others cannot go on without it."""
        self._ranks[0].kill()

    async def wait(self) -> int:
        """Waits until one of them ends, and the others with it; returns its exit code."""
        waiting = {asyncio.create_task(process.wait()): process for process in self._ranks}
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        first = min((waiting[task] for task in done), key=self._ranks.index)
        for process in self._ranks:
            await _ended(process)
        assert first.returncode is not None
        return first.returncode


async def start(server: ForkServer, ranks: Sequence[InstanceSettings], environment: Mapping[str, str]) -> Processes:
    """Raises OSError, with none of them left."""
    started = list[ForkedProcess]()
    try:
        for settings in ranks:
            rank = settings.rank
            started.append(
                await server.start(
                    f"aegis.instance.{'follower_rank' if rank else 'process'}",
                    f"{settings.instance}/{rank}" if rank else settings.instance,  # for readers of the process list
                    environment=environment,
                    stdin=msgspec.json.encode(settings),
                )
            )
    except BaseException:  # as where it is not waited for any more
        for process in started:
            process.kill()
        for process in started:
            await process.wait()
        raise
    return Processes(started)


_KERNELS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "96", "LRU_CACHE_CAPACITY": "8"}
"""How many compiled products oneDNN keeps, and torch's cache before it; 1024 each by default. Every other number of
rows has its own, of some 0.4 MiB, so that batches that change would fill them for nothing. oneDNN's holds the products
of a model with batches of up to 16; what torch keeps besides saves no time, and took 20 MiB of an instance."""


_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts as many as OpenMP may when it is imported, and nothing here multiplies matrices with it: a
process with several threads cannot be forked."""


def fork_server(processes: int, engine: EngineName, architectures: Sequence[str] = ()) -> ForkServer:
    """The parent of so many. It imports what they need, those architectures of transformers among it, but vLLM, which
    may start threads of its own. Raises OSError."""
    modules = ["aegis.node.preload", *(f"transformers:{name}" for name in architectures)]
    return ForkServer(modules if engine == "transformers" else [], environment_for(processes))


def build_before(server: ForkServer, spec: ModelSpec) -> None:
    """Has the modules of the model built for instances that are forked from now on, where the transformers engine runs
    it."""
    if spec.base is None and spec.manifest.pooling is None and spec.manifest.engine == "transformers":
        server.prepare("aegis.engine.modules:build_ahead", msgspec.msgpack.encode(spec))


def environment_for(processes: int, *, lanes: bool = False) -> dict[str, str]:
    """Threads shared fairly between so many: more than there are cores makes timings go wild. A core is left for the
    others of the server, unless an instance could not have two `lanes` without it."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // (processes + 1), min(2, cores // processes) if lanes else 0)
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **_KERNELS_KEPT, **_ONE_THREAD, **os.environ}


async def _ended(process: ForkedProcess) -> None:
    process.kill()
    await process.wait()
