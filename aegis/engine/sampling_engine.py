"""The state of a request's sampler, which all backends keep alike."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.ids import ModelId, RequestId
from aegis.core.request import Sampling
from aegis.engine.sampler import Sampler


class SamplingEngine:
    """The part of `Engine` that keeps it."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler or Sampler()

    def ready(self, model: ModelId, sampling: Sampling) -> bool:
        return self._sampler.grammars.ready(model, sampling.grammar)

    def start(
        self,
        model: ModelId,
        request: RequestId,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
    ) -> None:
        self._sampler.start(model, request, prompt, generated, sampling)

    def stop(self, request: RequestId) -> None:
        self._sampler.stop(request)
