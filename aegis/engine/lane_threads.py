"""The threads of an engine: one that runs steps on the whole device, or one for each lane of it.

What steps go through besides weights and KV, such as the memory that gathers are copied to, is each thread's own:
steps of two lanes run side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aegis.core.ids import ModelId
from aegis.device.protocol import Lane
from aegis.engine.scratch import Scratch

if TYPE_CHECKING:
    from aegis.engine.gpu.decode import GpuDecoder
    from aegis.engine.gpu.layer_pace import LayerPace


class _Here(threading.local):
    lane: Lane | None = None


_here = _Here()


def compute_in(lane: Lane) -> None:
    """The steps of the calling thread run in this lane from now on. Called before its first step: the threads of its
    pool are started by that, and stay where they were started."""
    lane.enter()
    torch.get_num_threads()  # a thread's first use of torch takes the number that any thread set last: let it be now
    torch.set_num_threads(lane.threads)  # the calling thread's: OpenMP, MKL and oneDNN keep one number per thread
    _here.lane = lane


class Decoders:
    """The decoders of all threads of an engine."""

    def __init__(self) -> None:
        self.all: list[GpuDecoder] = []

    def drop(self, model: ModelId) -> None:
        """What was recorded of the model's steps is not needed any more. From any thread."""
        for decoder in tuple(self.all):
            decoder.drop(model)


class Computing(threading.local):
    """One thread's means of running steps on a device. A thread that is in no lane runs decode steps through `decoder`,
    if it is given. The decoders of all threads are put into `decoders`."""

    def __init__(self, device: torch.device, decoder: GpuDecoder | None, decoders: Decoders) -> None:
        lane = _here.lane
        self.scratch = Scratch()
        self.decoder = decoder
        self.pace: LayerPace | None = None
        self._stream: Any = None
        if device.type == "cuda":
            from aegis.engine.gpu.decode import GpuDecoder
            from aegis.engine.gpu.layer_pace import LayerPace

            # torch prefers it on Hopper, and it plans anew, for some ten or hundred milliseconds, at each new length
            torch.backends.cuda.enable_cudnn_sdp(False)
            if device.index is not None:  # else leaving the stream would take the thread back to GPU 0, into a context
                torch.cuda.set_device(device)
            if lane is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            else:
                self._stream = torch.cuda.ExternalStream(lane.stream, device)  # type: ignore[no-untyped-call]
                self.pace = LayerPace(partial(_recorded, self._stream))
            if lane is not None or decoder is None:
                with torch.cuda.stream(self._stream):  # or its first step might be written before the zeros there are
                    self.decoder = GpuDecoder.on_cuda(device)
        if self.decoder is not None:
            decoders.all.append(self.decoder)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A stream of its own on a GPU: graphs cannot be recorded on the default one, and lanes have theirs. If what is
        inside fails, all that it launched has been run: memory of the requests that fail with it may be unmapped. Not
        if a rank is lost, for whose part a sum would wait for ever."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            except Exception:
                self.finish()
                raise

    def finish(self) -> None:
        """Returns when what was launched has been run."""
        if self.pace is not None:
            self.pace.finish()
        elif self._stream is not None:
            self._stream.synchronize()


def _recorded(stream: Any) -> torch.cuda.Event:
    """An event whose waiters sleep."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
