"""Communication between the ranks of a tensor-parallel instance during a forward pass: sums and parts, nothing else.

All ranks make the same calls in the same order with tensors of the same shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Barrier
from typing import Protocol

import torch
import torch.distributed as dist

_JOIN_S = 60
_LOOPBACK = "lo"


class RanksLost(BaseException):
    """The ranks cannot go on together: their processes have to end. No failure of a step, so nobody handles it."""


class Group(Protocol):
    """`size` ranks, of which this is number `rank`."""

    rank: int
    size: int

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, equal to the bit on all of them; may overwrite `part`. Raises RanksLost."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts side by side along the last dimension, in order of rank. Raises RanksLost."""
        ...


class ProcessGroup:
    """Ranks that are processes: over gloo on CPUs, over NCCL on GPUs."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, rendezvous: str, rank: int, size: int, *, device: str) -> ProcessGroup:
        """Waits for all ranks. `rendezvous` is a path where there is no file yet, the same for all of them and for no
        other group, ever. Raises RuntimeError if they do not come."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        dist.init_process_group(
            "nccl" if torch.device(device).type == "cuda" else "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_JOIN_S),
        )
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects at the first, which no graph may record
        return cls(rank, size)

    def add(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        with _together():
            dist.all_reduce(part)
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with _together():
            dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, -1)


@contextmanager
def _together() -> Iterator[None]:
    """Raises RanksLost if another rank is gone, which is no failure of the model."""
    try:
        yield
    except RuntimeError as error:
        raise RanksLost from error


class ThreadGroup:
    """Ranks that are threads of one process, for models that are checked."""

    def __init__(self, rank: int, shared: SharedParts) -> None:
        self.rank = rank
        self.size = len(shared.parts)
        self._shared = shared

    @classmethod
    def of(cls, size: int) -> list[ThreadGroup]:
        shared = SharedParts(size)
        return [cls(rank, shared) for rank in range(size)]

    def add(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchanged(part)).sum(0)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchanged(part), -1)

    def leave(self) -> None:
        """The others, who wait for this rank, raise BrokenBarrierError."""
        self._shared.barrier.abort()

    def _exchanged(self, part: torch.Tensor) -> list[torch.Tensor]:
        shared = self._shared
        shared.parts[self.rank] = part
        shared.barrier.wait()
        parts = list(shared.parts)
        shared.barrier.wait()
        return parts


class SharedParts:
    """The state that the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size)
        self.parts = [torch.empty(0)] * size
