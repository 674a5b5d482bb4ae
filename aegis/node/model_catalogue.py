"""The models that are served: registered, bound by every instance, removed; all beside serving.

A model is *loading* until every living instance has bound it, then *ready*; *failed* where an instance could not. Its
name is free again when every instance has let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from aegis.core.errors import ModelRefused, UserError
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import AddModel, DropModel, SetSlo, UnloadModel
from aegis.core.model import ModelChange, ModelSpec, Slo
from aegis.models.disk_cache import Hold
from aegis.models.lazy_models import LazyModels
from aegis.models.sources import Source, adapter_terms, check_name, read_sources
from aegis.models.terms import Terms
from aegis.node.catalogue.adapters import adapters_of, lost_base, refuse_while_adapters, weighed
from aegis.node.catalogue.image_renewals import ImageRenewals
from aegis.node.catalogue.image_text import read_text
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.catalogue.spec_maker import SpecMaker
from aegis.node.catalogue.wire import Wire
from aegis.node.image_caches import ImageCaches
from aegis.node.model_fit import misfit, too_short_gap
from aegis.node.registration import Register, RegistrationCancelled, RegistrationTurns, Report, was_unloaded
from aegis.node.sizing import slab_shortage
from aegis.process.tasks import watched
from aegis.telemetry.logs import log
from aegis.telemetry.registration import RegisteringModel, Waiting
from aegis.transport.node_messages import Registering
from memory.awaited_answers import AwaitedAnswers
from memory.budget import Budget
from proxy.routing.events import ModelAway, ModelRemoved, ModelUp, SloSet

_logger = logging.getLogger(__name__)

REGISTRATIONS_AT_ONCE = 2
"""Of models of this machine, and as many of those from elsewhere: a source that sends nothing keeps others from
elsewhere waiting, and no directory."""

COMING_MAX = 64
"""So many models are being registered, or wait for it, when no other may be added."""

_POLL_S = 0.02

_HARDWARE = Hardware()
_PINS = "the model cache does not hold all pinned images; raise --model-cache or pin fewer models"


@dataclass(slots=True)
class _Leaving:
    """A model that was removed; `instances` are those that have not dropped it yet, `cached` says whether any may still
    load its image from the model cache."""

    instances: set[InstanceId]
    cached: bool = True
    dropped: asyncio.Event = field(default_factory=asyncio.Event)


class Catalogue:
    """All models by the names that clients use."""

    def __init__(
        self,
        wire: Wire,
        budget: Budget,
        images: ImageCaches,
        register: Register,
        terms: Terms,
        *,
        default_slo: Slo,
        hardware: Hardware = _HARDWARE,
    ) -> None:
        self._wire = wire
        self.budget = budget
        self._images = images
        self._default_slo = default_slo
        self._hardware = hardware
        self._models: dict[ModelId, CatalogueModel] = {}
        terms = replace(terms, limit_bytes=budget.pages * budget.page_bytes)
        self._specs = SpecMaker(register, self._models, terms)
        self._leaving: dict[ModelId, _Leaving] = {}
        self._unloading = AwaitedAnswers[ModelId]()
        self._coming: dict[ModelId, RegisteringModel] = {}
        self._lazy = LazyModels()
        self._unwanted: dict[ModelId, RegistrationCancelled] = {}  # of those that are coming, to be told
        self._turns, self._fetching_turns = [RegistrationTurns(REGISTRATIONS_AT_ONCE) for _ in range(2)]
        self._admitting = asyncio.Lock()
        self._renewals = ImageRenewals(self)

    def models(self) -> Mapping[str, CatalogueModel]:
        return cast(Mapping[str, CatalogueModel], self._models)

    def coming(self) -> Mapping[str, RegisteringModel]:
        """The models that are being registered, with their progress, and those that wait for a request."""
        return cast(Mapping[str, RegisteringModel], self._lazy.cards(self._coming))

    def has(self, model: ModelId) -> bool:
        """Served, or to be served when a request wants it."""
        return model in self._models or model in self._lazy

    def specs(self) -> list[ModelSpec]:
        """The models that an instance is told of when it comes up."""
        return [model.spec for model in self._models.values()]

    def ready(self) -> list[ModelUp | Registering]:
        """The models that a proxy is told of when it comes up."""
        ready = [model for model in self._models.values() if model.state == "ready" and not model.away]
        return [self._registering_event(), *(model.up for model in ready)]

    def least_pages(self) -> int:
        """The fewest pages of a device with which an instance can serve the largest model; one at least."""
        served = (self._weighed(model.spec).manifest for model in self._models.values() if model.state != "failed")
        return max((self.budget.least_pages(manifest.image_bytes) for manifest in served), default=1)

    def unbound(self) -> set[InstanceId]:
        """Instances that are up and have not bound every model that can be served."""
        return {i for m in self._models.values() if m.state != "failed" for i in set(self._wire.up) - m.bound}

    def share_among(self, instances: int) -> None:
        """So many share the host memory from now on. Raises UserError, with nothing changed, where clients of a model
        were promised longer requests than it then holds."""
        budget = dataclasses.replace(self.budget, instances=instances)
        if shortage := slab_shortage(budget.host_slabs, instances):
            raise UserError(shortage)
        for model in self._models.values():
            manifest = self._weighed(model.spec).manifest
            promised = min(model.kv_limit_tokens, manifest.context_tokens)
            held = budget.sequence_tokens(manifest.image_bytes, manifest.kv)
            if held < promised:
                raise UserError(
                    f"with {instances} instances host memory holds KV of {max(held, 0)} tokens of {model.spec.model}, "
                    f"whose clients were promised {promised}; raise --host-memory"
                )
        self.budget = budget

    # --- what users ask -----------------------------------------------------------------------------------------------

    async def add(
        self, source: str, name: str | None, *, lazy: bool = False, base: str | None = None
    ) -> CatalogueModel | Waiting:
        """One model, under another name if given; an adapter, if a `base` is. Raises UserError."""
        try:
            sources = await asyncio.to_thread(read_sources, [source], default_slo=self._default_slo)
        except UserError as error:  # which names the option of the command line
            raise UserError(error.message, param="source") from None
        if len(sources) != 1:
            raise UserError(f"{source} holds {len(sources)} models; add them one at a time", param="source")
        model = check_name(name) if name is not None else sources[0].model
        if self.has(model):
            raise UserError(f"there is already a model named '{model}'", status=409, param="name")
        (found,) = sources
        own = replace(found, model=model, pin=False, lazy=lazy or found.lazy, base=found.base if base is None else base)
        try:
            own = adapter_terms(found.root, own)
        except UserError as error:
            raise UserError(error.message, param="source") from None
        if model in self._coming:
            raise UserError(f"'{model}' is being registered already", status=409, param="name")
        if len(self._coming) >= COMING_MAX:
            message = f"{len(self._coming)} models are being registered; add '{model}' when some of them are ready"
            raise UserError(message, status=503, code="too_many_registrations", kind="server_error")
        [(_, outcome)] = [became async for became in self.register([own])]
        if isinstance(outcome, ModelRefused):
            raise outcome
        return outcome

    async def remove(self, name: str) -> None:
        """Removes a model: its requests end at once, or its registration. Raises UserError."""
        model = ModelId(name)
        unwanted = self._unwanted.get(model)
        if model in self._models:
            refuse_while_adapters(model, self._models)
            self._forget(model)
        elif unwanted:
            unwanted.add(model)
        elif model not in self._lazy:
            raise UserError(f"there is no model named '{name}'", status=404, param="model")
        if self._lazy.remove(model):
            self._notify_coming()
        while unwanted and self._unwanted.get(model) is unwanted:
            await asyncio.sleep(_POLL_S)

    def unload(self, name: str) -> CatalogueModel:
        """Its weights leave each instance as soon as no request of it is there, and the model caches after that. It is
        served as before. Raises UserError."""
        model = self._models.get(ModelId(name))
        if model is None:
            raise UserError(f"there is no model named '{name}'", status=404, param="model")
        if model.pinned:
            message = f"model '{name}' is pinned; unpin it first (aegis models set {name} --unpin)"
            raise UserError(message, status=409, param="model")
        self._wire.broadcast(UnloadModel(model.spec.model))
        if self._unloading.begin(model.spec.model, self._wire.up):
            self._images.unload(model.spec.model)
        return model

    def revise(self, source: Source) -> bool:
        """Whether it waits for a request; it will be registered on these terms."""
        return self._lazy.revise(source)

    async def change(self, name: str, change: ModelChange) -> CatalogueModel:
        """Raises UserError, with nothing changed."""
        model = self._models.get(ModelId(name))
        if model is None:
            raise UserError(f"there is no model named '{name}'", status=404, param="model")
        is_new = change.gap_ns not in (None, model.spec.slo.gap_ns, self._default_slo.gap_ns)
        if is_new and (refusal := too_short_gap(model.spec, change.gap_ns or 0, self._hardware)):
            raise UserError(refusal, param="slo")
        if model.spec.base is not None and change.deadlines(model.spec.slo) != model.spec.slo:
            message = f"'{name}' is run with '{model.spec.base}' and has its deadlines; set them there"
            raise UserError(message, param="slo")
        if change.pinned is not None:
            await self._pin(model.spec.model, change.pinned)
        if change.priority is not None:
            model.priority = change.priority
        if change.limits is not None:
            model.limits = change.limits
        if change.pace is not None:
            model.pace = change.pace
        slo = change.deadlines(model.spec.slo)
        for changed in (model, *adapters_of(model.spec.model, self._models)) if slo != model.spec.slo else ():
            changed.spec = replace(changed.spec, slo=slo)
            self._wire.broadcast(SetSlo(changed.spec.model, slo))
        self._wire.notify_proxies(SloSet(model.spec.model, slo))  # and with it what else is new of the model
        return model

    def expect(self, source: Source, progress: str) -> RegistrationCancelled:
        """Its checkpoint is still to come: until `expect_no_more`, requests for it wait. It is in what is returned once
        it is removed, and whoever removed it waits for `expect_no_more`."""
        unwanted = self._unwanted[source.model] = RegistrationCancelled()
        self._come({source.model: RegisteringModel(source.root, progress)})
        return unwanted

    def expect_no_more(self, model: ModelId, *, comes: bool = False) -> None:
        """Where it `comes`, it is registered next, without a pause, and proxies are told nothing between: requests that
        wait would find no such model."""
        del self._unwanted[model]
        self._coming = {other: coming for other, coming in self._coming.items() if other != model}
        if not comes:
            self._notify_coming()

    def want(self, model: ModelId) -> None:
        """A request for a model that was to wait for one has come, or, at a proxy that came later, for one whose image
        has left the disk."""
        if model in self._models and self._models[model].has_left:
            self.damaged(model, "it has left the disk")
        if source := self._lazy.bring(model):
            watched(self._bring(source))

    async def _bring(self, source: Source) -> None:
        if source.base and (base := self._lazy.bring(ModelId(source.base))):  # both left when it could not be fetched
            await self._bring(base)
        while source.base and self._lazy.is_brought(ModelId(source.base)):  # a request for the base came first
            await asyncio.sleep(_POLL_S)
        async for _, outcome in self.register([source], wanted=True):
            if isinstance(outcome, ModelRefused):
                log(_logger, logging.WARNING, "model not fetched", {"model": source.model, "reason": outcome.message})

    async def register(
        self, sources: Sequence[Source], report: Report = lambda _model, _text: None, *, wanted: bool = False
    ) -> AsyncIterator[tuple[Source, CatalogueModel | Waiting | ModelRefused]]:
        """Registers and binds; yields what became of each. Requests to other models go on meanwhile. Lazy models are
        only looked at unless they are `wanted`."""
        coming = {source.model: RegisteringModel(source.root) for source in sources if source.model not in self._coming}
        unwanted = RegistrationCancelled()
        self._unwanted |= dict.fromkeys(coming, unwanted)
        self._come(coming)

        def report_progress(model: ModelId, text: str) -> None:
            if model in coming:
                coming[model] = replace(coming[model], progress=text)
                self._come({model: coming[model]})
            report(model, text)

        try:
            async with self._turn(sources, unwanted):
                async for source, spec in self._specs.make(sources, report_progress, unwanted, wanted=wanted):
                    outcome = await self._became(source, spec, unwanted)
                    if coming.pop(source.model, None):
                        self._come({}, removed=[source.model])
                    yield source, outcome
        finally:
            self._come({}, removed=coming)

    async def refusals(self, sources: Sequence[Source]) -> dict[ModelId, str]:
        """Why they cannot be served, of those of which registration finds a reason. Nothing is served anew, and models
        of the same names go on."""
        refusals: dict[ModelId, str] = {}
        unwanted = RegistrationCancelled()
        async with self._turn(sources, unwanted):
            async for source, found in self._specs.make(sources, unwanted=unwanted, wanted=False):
                if refusal := found.message if isinstance(found, ModelRefused) else found and self._misfit(found):
                    refusals[source.model] = refusal
        return refusals

    def _turn(
        self, sources: Sequence[Source], unwanted: RegistrationCancelled
    ) -> contextlib.AbstractAsyncContextManager[None]:
        turns = self._turns if all([source.path for source in sources]) else self._fetching_turns
        return turns.turn([source.model for source in sources], unwanted)

    async def _became(
        self, source: Source, found: ModelSpec | ModelRefused | None, unwanted: RegistrationCancelled
    ) -> CatalogueModel | Waiting | ModelRefused:
        """None was found: it waits."""
        if found is None:
            if source.model in unwanted:
                return was_unloaded(source.model)
            self._lazy.add(source)
            return Waiting(source.model, source.root)
        outcome = found if isinstance(found, ModelRefused) else await self._admit(source, found, unwanted)
        if isinstance(outcome, ModelRefused):
            self._lazy.refused(source.model, outcome.message)
        else:
            self._lazy.remove(source.model)
        return outcome

    # --- images -------------------------------------------------------------------------------------------------------

    def damaged(self, model: ModelId, reason: str, *, wanted: bool = False) -> None:
        """The model's image on disk has changed: it is made again from the checkpoint. Instances that have the weights
        go on; once an instance `wanted` to load them, newly placed requests wait."""
        found = self._models.get(model)
        if found is not None and found.state != "failed":
            if wanted:
                self._put_away(found)
            self._renewals.begin(found, reason)

    def _put_away(self, model: CatalogueModel) -> None:
        if not model.away:
            model.away = True
            self._wire.notify_proxies(ModelAway(model.spec.model))

    def uncached(self, model: ModelId) -> None:
        """No instance loads the image of a removed model from the model cache any more."""
        self._leaving[model].cached = False
        self._let_go(model)

    def used(self, model: ModelId, now_ns: int) -> None:
        """A request for it came."""
        if model in self._models:
            self._unloading.forget(model)
            self._images.use(model, now_ns)
            if base := self._models[model].spec.base:
                self.used(base, now_ns)
            self._models[model].used_on_disk(now_ns)

    # --- what instances say -------------------------------------------------------------------------------------------

    def added(self, model: ModelId, instance: InstanceId) -> None:
        if model in self._models:
            self._models[model].bound.add(instance)
            self._settle(self._models[model])

    def refused(self, model: ModelId, instance: InstanceId, reason: str) -> None:
        """An instance cannot bind the model. Where its image has left the disk, or that of its base, the instance is
        told of it again when that is back, and newly placed requests wait; else the model has failed."""
        found = self._models.get(model)
        base = self._models.get(found.spec.base) if found and found.spec.base else None
        if found and found.state == "ready" and (found.renewing or found.has_left):
            found.refused_by.add(instance)
            self.damaged(model, reason, wanted=True)
        elif found and base and instance in base.refused_by:
            found.refused_by.add(instance)
            self._put_away(found)
        else:
            self.failed(model, reason)

    def failed(self, model: ModelId, reason: str) -> None:
        """It cannot be bound by an instance: none serves it then, because any instance may get its requests."""
        if model in self._models:
            self._fail(self._models[model], reason)
            self._wire.notify_proxies(ModelRemoved(model, f"cannot be served: {reason}"))
            for adapter in adapters_of(model, self._models):
                self.failed(adapter.spec.model, f"its base '{model}' cannot be served")

    def dropped(self, model: ModelId, instance: InstanceId) -> None:
        """The instance has nothing of the model any more."""
        if model in self._leaving:
            self._leaving[model].instances.discard(instance)
            self._let_go(model)

    def unloaded(self, model: ModelId, instance: InstanceId) -> None:
        """The instance has had its weights no more since it was asked."""
        if self._unloading.answered(model, instance):
            self._images.unload(model)

    def lost(self, instance: InstanceId) -> None:
        """The instance's process is gone, and with it all models that it had bound."""
        for unloaded in self._unloading.lost(instance):
            self._images.unload(unloaded)
        for model in list(self._models.values()):
            model.bound.discard(instance)
            model.refused_by.discard(instance)
            self._settle(model)
        for leaving in list(self._leaving):
            self.dropped(leaving, instance)

    # ------------------------------------------------------------------------------------------------------------------

    def make_again(
        self, sources: Sequence[Source], report: Report
    ) -> AsyncIterator[tuple[Source, ModelSpec | ModelRefused | None]]:
        return self._specs.make(sources, report, renew=True)

    async def supply_again(self, spec: ModelSpec) -> None:
        await self._images.supply(spec, renewed=True)

    def renewed(self, model: CatalogueModel) -> None:
        for served in (model, *adapters_of(model.spec.model, self._models)):
            refused_by, served.refused_by = served.refused_by, set()
            for instance in sorted(refused_by):
                self._wire.post(instance, AddModel(served.spec))
        self._settle(model)
        self._notify_coming()  # proxies that came while its image was gone look again

    def waits_again(self, model: CatalogueModel, refusal: str) -> None:
        name = model.spec.model
        for adapter in adapters_of(name, self._models):  # without the base there are no steps for them to run in
            self._wait_again(adapter, replace(adapter.source, base=name), f"its base '{name}' waits: {refusal}")
        self._wait_again(model, model.source, refusal)
        self._notify_coming()

    def _wait_again(self, model: CatalogueModel, source: Source, refusal: str) -> None:
        self._forget(model.spec.model, f"cannot be served now: {refusal}", returns=True)
        self._lazy.add(source, refusal)

    def _weighed(self, spec: ModelSpec) -> ModelSpec:
        return weighed(spec, self._models[spec.base].spec if spec.base else None, self.budget)

    def _misfit(self, spec: ModelSpec) -> str:
        """Why it cannot be run here on its terms; empty if it can."""
        refusal = misfit(self._weighed(spec), self.budget)
        if not refusal and spec.slo.gap_ns != self._default_slo.gap_ns:
            refusal = too_short_gap(spec, spec.slo.gap_ns, self._hardware)
        return refusal or ""

    def _come(self, changed: Mapping[ModelId, RegisteringModel], *, removed: Collection[ModelId] = ()) -> None:
        """Tells proxies at once, so that any of them says that the model is being registered."""
        for model in removed:
            del self._unwanted[model]
        if changed or removed:
            kept = {model: coming for model, coming in self._coming.items() if model not in removed}
            self._coming = kept | dict(changed)
            self._notify_coming()

    def _notify_coming(self) -> None:
        self._wire.notify_proxies(self._registering_event())

    def _registering_event(self) -> Registering:
        return Registering({**self.coming()})

    async def _pin(self, model: ModelId, pinned: bool) -> None:
        while pinned and self._images.evicting(model):
            await asyncio.sleep(_POLL_S)
            if model not in self._models:
                raise UserError(f"model '{model}' was removed", status=404, param="model")
        if not pinned:
            self._images.unpin(model)
            return
        self._unloading.forget(model)
        if not self._images.pin(model):
            message = f"{model} does not fit beside what is pinned; unpin another, or raise --model-cache"
            raise UserError(message, status=409, param="pin")

    async def _admit(
        self, source: Source, spec: ModelSpec, unwanted: RegistrationCancelled
    ) -> CatalogueModel | ModelRefused:
        async with self._admitting:
            while spec.model in self._leaving:  # an instance may be in a step of a model that bore this name
                await self._leaving[spec.model].dropped.wait()
            if gone := lost_base(source, spec, self._models):
                return gone
            refusal = self._misfit(spec)
            if refusal or spec.model in self._models:
                return ModelRefused(refusal or f"there is already a model named '{spec.model}'")
            try:
                text = await read_text(source, spec)
                await self._images.supply(spec)
            except ModelRefused as refused:
                return refused
            except OSError as error:  # a lazy model's may have left the cache for another's already
                return ModelRefused(f"{source.root}: its image cannot be read: {error.strerror or error}; ask again")
            if gone := was_unloaded(spec.model) if spec.model in unwanted else lost_base(source, spec, self._models):
                return gone
            if not self._images.add(spec, pinned=source.pin):
                return ModelRefused(f"{source.root}: it is to be pinned, and {_PINS}")
            image_bytes = self._weighed(spec).manifest.image_bytes
            model = self._models[spec.model] = CatalogueModel(
                spec,
                source,
                self._images,
                text,
                self.budget.sequence_tokens(image_bytes, spec.manifest.kv),
                self.budget.device_tokens(image_bytes, spec.manifest.kv),
                priority=source.priority,
                limits=source.limits,
                pace=source.pace,
                hold=None if source.lazy else Hold(Path(spec.directory)),
            )
        self._wire.broadcast(AddModel(spec))
        if not self._wire.up:
            self._settle(model)
        try:
            await model.settled.wait()
        except asyncio.CancelledError:  # the client that asked for it has left
            if self._models.get(spec.model) is model:
                for left in (*adapters_of(spec.model, self._models), model):  # which cannot run without it
                    self._forget(left.spec.model)
            raise
        if self._models.get(spec.model) is not model:
            return was_unloaded(spec.model)
        if model.state == "failed":
            self._forget(spec.model)
            return ModelRefused(f"{source.root}: {model.detail}")
        return model

    def _settle(self, model: CatalogueModel) -> None:
        waits = model.state == "loading" or (model.state == "ready" and model.away and not model.renewing)
        if waits and model.bound >= set(self._wire.up):
            model.state, model.away = "ready", False
            self._wire.notify_proxies(model.up)
            model.settled.set()

    def _fail(self, model: CatalogueModel, reason: str) -> None:
        model.state, model.detail = "failed", reason
        model.settled.set()

    def _forget(self, model: ModelId, why: str = "was removed", *, returns: bool = False) -> None:
        left = self._models.pop(model)
        self._unloading.forget(model)
        self._wire.notify_proxies(ModelRemoved(model, why, returns))
        if left.hold:
            left.hold.release()
        if left.state == "loading":
            self._fail(left, "it was removed")
        self._leaving[model] = _Leaving(set(self._wire.up))
        self._images.drop(model)
        self._wire.broadcast(DropModel(model))

    def _let_go(self, model: ModelId) -> None:
        """Frees the model's name, once nothing of it is left anywhere."""
        leaving = self._leaving[model]
        if not leaving.instances and not leaving.cached:
            self._leaving.pop(model).dropped.set()
