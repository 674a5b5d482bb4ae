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
from aegis.core.request import Sampling, Token
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


class Row(Struct, frozen=True):
    """One sequence in a decode step: `token`, the last one generated, goes to position `position`, whose KV is written
    to `blocks[position // block_tokens]`. Positions `[0, position]` are attended to."""

    request: RequestId
    token: int
    position: int
    blocks: BlockTable


class Sampled(Struct, frozen=True):
    """The next token of one row; with its prompt's logprobs after a prefill that asked for them."""

    token: Token
    prompt: tuple[Token, ...] = ()


class Engine(Protocol):
    """A backend. All calls come from one thread; steps return when their tokens are known."""

    def prepare(self, spec: ModelSpec) -> None:
        """Builds what `attach` will bind. May be left out, and may run in another thread beside steps.

        Raises ModelRefused.
        """
        ...

    def discard(self, spec: ModelSpec) -> None:
        """Forgets what `prepare` built and `attach` did not take; from the same thread."""
        ...

    def attach(self, spec: ModelSpec, weights_base: int) -> None:
        """Binds the model's parameters as views at `weights_base + tensor.offset`. Touches no byte there.

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

    def extend(self, model: ModelId, tokens: Sequence[int], blocks: BlockTable, start: int) -> bool:
        """Runs positions `[start, len(tokens))` and writes their KV to `blocks`, which hold that of the positions
        before. False: it did nothing, and `prefill` runs them too, since their KV depends on the whole prompt."""
        ...

    def prefill(
        self, model: ModelId, request: RequestId, tokens: Sequence[int], blocks: BlockTable, start: int = 0
    ) -> Sampled:
        """The same, and samples the next token. `start` is 0 if the prompt's logprobs are requested."""
        ...

    def decode(self, model: ModelId, rows: Sequence[Row]) -> list[Sampled]:
        """One step for each row, in order."""
        ...


class KvRegion(Struct, frozen=True):
    """The device's KV memory as an engine addresses it: block b of a shape lies at
    `base + (b // per_slab) * slab_bytes + (b % per_slab) * block_bytes`, `per_slab = slab_bytes // block_bytes`."""

    base: int
    nbytes: int
    slab_bytes: int

    def blocks_per_slab(self, shape: KvShape) -> int:
        return self.slab_bytes // shape.block_bytes
