"""The backends of an instance: each model runs on the one that its image names, all in one process over the same KV
region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Literal

from aegis.core.ids import ModelId
from aegis.core.model import EngineName, Manifest, ModelSpec
from aegis.engine.lean_transformers import import_transformers
from aegis.engine.parallel.group import Group
from aegis.engine.protocol import Engine, KvRegion, Sampled, StepRow
from aegis.engine.sampler import Sampler
from aegis.engine.sampling_engine import SamplingEngine

Backend = EngineName | Literal["pooling"]


def backend_of(manifest: Manifest) -> Backend:
    """The backend that runs the model."""
    return "pooling" if manifest.pooling else manifest.engine


def engine_class(name: Backend) -> Callable[..., Engine]:
    """Called with the KV region and, by name, `device`, `sampler` and, of a rank, `group`. Imports what it needs only.
    Raises UserError."""
    if name == "vllm":
        from aegis.engine.vllm.engine import VllmEngine

        return VllmEngine
    import_transformers()
    if name == "pooling":
        from aegis.engine.pooling_engine import PoolingEngine

        return PoolingEngine
    from aegis.engine.transformers_engine import TransformersEngine

    return TransformersEngine


class Engines(SamplingEngine):
    """Implements `Engine` by handing on. `first` is initialised at once, another when a model of its comes; one sampler
    is shared by all of them, for requests name no model when they start. `group` are the ranks that
    share models out, if there are any. `initialisations` counts the engines that were initialised."""

    def __init__(
        self,
        kv: KvRegion,
        *,
        device: str,
        first: EngineName,
        sampler: Sampler | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(sampler)
        self._kv = kv
        self._named: dict[str, object] = {"device": device, "sampler": self._sampler}
        if group is not None:
            self._named["group"] = group
        self.initialisations = 0
        self._open: dict[Backend, Engine] = {}
        self._opening = Lock()  # a model may be prepared beside another one that is attached
        self._of: dict[ModelId, Engine] = {}  # attached models
        self._building = Lock()  # of two that build, each restores torch's default dtype to what the other had set
        self._engine(first)

    def prepare(self, spec: ModelSpec) -> None:
        engine = self._engine(backend_of(spec.manifest))
        with self._building:
            engine.prepare(spec)

    def discard(self, spec: ModelSpec) -> None:
        if backend_of(spec.manifest) in self._open:
            self._open[backend_of(spec.manifest)].discard(spec)

    def attach(self, spec: ModelSpec, weights_base: int) -> None:
        engine = self._engine(backend_of(spec.manifest))
        with self._building:
            engine.attach(spec, weights_base)
        self._of[spec.model] = engine

    def detach(self, model: ModelId) -> None:
        if model in self._of:
            self._of.pop(model).detach(model)

    def extends(self, model: ModelId) -> bool:
        return self._of[model].extends(model)

    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        return self._of[model].step(model, rows)

    def _engine(self, name: Backend) -> Engine:
        """Raises UserError if it is not installed."""
        with self._opening:
            if name not in self._open:
                self._open[name] = engine_class(name)(self._kv, **self._named)
                self.initialisations += 1
            return self._open[name]
