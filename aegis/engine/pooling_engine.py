"""The backend of models that pool: a step runs whole texts, and each row's answer is its vector.

Weights are bound as those of models that generate are (`transformers_engine`), so a switch is the same copy. Nothing is
kept of a text: rows have blocks, for they are counted by them, and nothing is written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.request import Token
from aegis.engine.lane_threads import Computing, Decoders
from aegis.engine.modules import bound, built
from aegis.engine.pooled_models import SPELLED_OUT, PooledModel, Text, add_dense, auto_class, without_head
from aegis.engine.protocol import KvRegion, Sampled, StepRow
from aegis.engine.sampler import Sampler
from aegis.engine.sampling_engine import SamplingEngine


class PoolingEngine(SamplingEngine):
    """Implements `Engine`."""

    def __init__(self, kv: KvRegion, *, device: str = "cpu", sampler: Sampler | None = None) -> None:
        super().__init__(sampler)
        self._device = torch.device(device)
        self._models: dict[ModelId, PooledModel] = {}
        self._prepared: dict[tuple[ModelId, str], PreTrainedModel] = {}
        self._computing = Computing(self._device, None, Decoders())

    def prepare(self, spec: ModelSpec) -> None:
        self._prepared[spec.model, spec.manifest.fingerprint] = _built(spec)

    def discard(self, spec: ModelSpec) -> None:
        self._prepared.pop((spec.model, spec.manifest.fingerprint), None)

    def attach(self, spec: ModelSpec, weights_base: int) -> None:
        pooling = spec.manifest.pooling
        assert spec.model not in self._models and pooling is not None
        module = self._prepared.pop((spec.model, spec.manifest.fingerprint), None) or _built(spec)
        bound(module, spec, weights_base, self._device)
        self._models[spec.model] = PooledModel(module, pooling)

    def detach(self, model: ModelId) -> None:
        self._models.pop(model, None)

    def extends(self, model: ModelId) -> bool:
        """Rows are whole prompts, which are run side by side."""
        return True

    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        assert all(row.start == 0 and row.samples for row in rows)
        texts = [Text(row.tokens, self._sampler.sampling(row.request).pair_at) for row in rows]
        with self._computing.on_stream():
            vectors = self._models[model].vectors(texts).cpu().numpy().astype("<f4")
        return [Sampled(Token(0, vector=vector.tobytes())) for vector in vectors]


def _built(spec: ModelSpec) -> PreTrainedModel:
    pooling = spec.manifest.pooling
    assert pooling is not None
    try:
        module = built(spec, auto_class(pooling), attention="sdpa")
    except ModelRefused:  # some architectures have a slower one only
        module = built(spec, auto_class(pooling), attention=SPELLED_OUT)
    if not pooling.scores:
        without_head(module)
        add_dense(module, pooling)
    return module
