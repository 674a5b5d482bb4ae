"""The engine protocol: runs batches of one model over paged KV, knows nothing of policies, queues or pages.

An engine is initialised once per process. `attach` binds a model's parameters to its weight range, once for its life;
the caller decides which models' bytes are there at a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec import Struct

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import Failure, Sampling, Token
from aegis.engine.block_table import BlockTable


class EngineFailed(Exception):
    """An engine raised in a step, for the reason in its cause. The requests of that step fail, not the instance."""


@contextmanager
def engine_at_work() -> Iterator[None]:
    """An error that is raised within is the engine's. Raises EngineFailed."""
    try:
        yield
    except Exception as error:  # whatever a model did to the engine
        raise EngineFailed(type(error).__name__) from error


class StepRow(Struct, frozen=True):
    """Positions `[start, start + len(tokens))` of one sequence, at least one, in a step. The KV of position p is
    written to `blocks[p // block_tokens]`. The positions before `start`, whose KV is there, are attended to as well.
    A token follows if it `samples`."""

    request: RequestId
    tokens: Sequence[int]
    start: int
    blocks: BlockTable
    samples: bool = True
    adapter: ModelId | None = None  # an attached one of the model

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Sampled(Struct, frozen=True):
    """The next token of one row; with its prompt's logprobs if the row is the prompt and they were asked for. Where
    there is a `problem`, which is for the client, the token is any, and the request has failed."""

    token: Token
    prompt: tuple[Token, ...] = ()
    problem: Failure | None = None


class Engine(Protocol):
    """A backend. Steps return when their tokens are known and their KV is written. All calls come from one thread, but
    where the device is divided: there the steps of each lane come from a thread of the lane, which `compute_in` has put
    there. No request is in steps of two lanes at once, and none is stopped, no model detached, during its steps."""

    def prepare(self, spec: ModelSpec) -> None:
        """Builds what `attach` will bind. May be left out, and may run in another thread beside steps.

        Raises ModelRefused.
        """
        ...

    def discard(self, spec: ModelSpec) -> None:
        """Forgets what `prepare` built and `attach` did not take; from the same thread."""
        ...

    def attach(self, spec: ModelSpec, weights_base: int) -> None:
        """Binds the model's parameters as views at `weights_base + tensor.offset`. Touches no byte there. An adapter is
        attached after its base.

        Raises ModelRefused if the backend cannot run the model.
        """
        ...

    def detach(self, model: ModelId) -> None:
        """Unbinds it; models that are not attached are ignored."""
        ...

    def ready(self, model: ModelId, sampling: Sampling) -> bool:
        """Whether steps can follow `start` at once; if not, the missing part is being made beside other steps."""
        ...

    def start(
        self,
        model: ModelId,
        request: RequestId,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
    ) -> None:
        """Makes the sampler's state for a request (penalty counts, places in its random stream and grammar)."""
        ...

    def stop(self, request: RequestId) -> None:
        """Forgets it; unknown requests are ignored."""
        ...

    def extends(self, model: ModelId) -> bool:
        """Whether the KV of a position is the same whatever follows it or runs beside it. If not, a prompt has to be
        run whole, from position 0, in a step of its own."""
        ...

    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Runs all rows at once; the result is in their order, None for those that do not sample. The row of a prompt
        whose logprobs are requested is whole and alone."""
        ...


class KvRegion(Struct, frozen=True):
    """The device's KV memory as an engine addresses it: block b of a shape lies at
    `base + (b // per_slab) * slab_bytes + (b % per_slab) * block_bytes`, `per_slab = slab_bytes // block_bytes`."""

    base: int
    nbytes: int
    slab_bytes: int

    def blocks_per_slab(self, shape: KvShape) -> int:
        return self.slab_bytes // shape.block_bytes
