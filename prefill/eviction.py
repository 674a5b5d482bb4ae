"""Room on a prefill instance's device: made for the next job, given up for other instances.

Missing pages come, in this order, from (1) the device, if it has pages to spare; (2) weights of models that are needed
last; (3) a prefetch under way; (4) other instances, which are asked for them urgently.
"""

from __future__ import annotations

from collections.abc import Iterable

from aegis.core.ids import ModelId
from aegis.core.messages import TakeBack
from aegis.core.model import KvShape
from aegis.core.request import Job
from memory.ledger import Ledger
from memory.weight_eviction import WeightEviction
from prefill.counters import Counters
from prefill.queue import Queue
from prefill.reasons import EvictionReasons


class Eviction:
    """`had_step`: a job has run since the instance last made way for others. If there are `reasons`, evictions are
    explained."""

    def __init__(
        self, ledger: Ledger, queue: Queue, counters: Counters, reasons: EvictionReasons | None = None
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._counters = counters
        self._weights = WeightEviction(ledger, reasons)
        self.had_step = False

    # --- for the next job ---------------------------------------------------------------------------------------------

    def load(self, job: Job, model: ModelId) -> bool:
        """Whether the weights of the job's model, or of its adapter, are on their way now."""
        ledger = self._ledger
        if ledger.must_wait(self._weight_pages(model)):
            return False
        if self._weights.load(model, self._expendable(job.model, job.adapter)):
            return True
        self._demand(job)
        return False

    def make(self, job: Job, blocks: int) -> bool:
        """Whether the device has `blocks` for the job now; if not, an event follows."""
        ledger, device = self._ledger, self._ledger.device
        shape = self._shape(job.model)
        if device.room(shape) >= blocks:
            return True
        if ledger.must_wait(ledger.kv_pages(shape, blocks)):
            return False
        victims = self._expendable(job.model, job.adapter)
        for at in range(len(victims)):
            self._weights.evict(victims, at, job.model)
            if device.room(shape) >= blocks:
                return True
        self._demand(job)
        return False

    def prefetch(self) -> None:
        """Loads the next group's model while this one prefills, but never at the cost of anything that the queue needs
        sooner: models, and room for the KV of the running group's jobs."""
        weights, running = self._ledger.weights, self._queue.running
        if loading := weights.loading():
            wanted = self._queue.wanted()
            self._abandon(model for model, _ in loading if model not in wanted)
        if running is None or loading:
            return
        model = next((model for model in self._queue.needed() if model != running.job.model), None)
        if model is None or weights.is_resident(model):
            return
        spare = self._spare_pages()
        if self._ledger.must_wait(self._weight_pages(model) + spare):
            return
        wanted = self._queue.wanted()
        idle = [victim for victim in self._expendable(model) if victim not in wanted]
        if self._weights.load(model, idle, spare=spare, prefetch=True):
            self._counters.prefetches += 1

    # --- for other instances ------------------------------------------------------------------------------------------

    def give_way(self, now_ns: int, *, lacks_slabs: bool) -> None:
        """Frees owed pages. The model in front makes way when its time is over and a job has run, or if none can run
        for lack of host slabs, which others may only free with these pages; at once when it stands still."""
        balloon, front = self._ledger.balloon, self._queue.front()
        if front and not self.had_step and not balloon.stands_still and not lacks_slabs:
            balloon.expire(now_ns)  # a job keeps the pages it was granted until it has run
            return
        yields = balloon.stands_still or balloon.must_yield(now_ns)
        self.had_step = self.had_step and not yields
        balloon.settle(now_ns)
        victims = self._expendable(front.model if front and not yields else None)
        for at in range(len(victims)):
            if not balloon.short:
                return
            self._weights.evict(victims, at, None)
            balloon.settle(now_ns)

    def give_back(self, asked: TakeBack, now_ns: int) -> None:
        """Gives back pages that the node asks for; gently, only those of models that no job needs now."""
        wanted = self._queue.wanted()
        self._weights.give_back(asked, [model for model in self._expendable(None) if model not in wanted], now_ns)

    # ------------------------------------------------------------------------------------------------------------------

    def _demand(self, job: Job) -> None:
        """Other instances have to give back all pages that the job lacks at once: an instance that held a part and
        waited for the rest would have it taken, again and again."""
        ledger = self._ledger
        if ledger.device.moving or self._abandon(model for model, _ in ledger.weights.loading()):
            return
        self._weights.evict_all(self._expendable(job.model, job.adapter), job.model)
        shape = self._shape(job.model)
        pages = ledger.kv_pages(shape, shape.blocks_for(job.prefill_tokens))
        if not ledger.weights.is_resident(job.model):
            pages += self._weight_pages(job.model)
        if job.adapter is not None and not ledger.weights.is_resident(job.adapter):
            pages += self._weight_pages(job.adapter)
        ledger.balloon.want(pages - ledger.pool.free, urgent=True)

    def _expendable(self, needed: ModelId | None, adapter: ModelId | None = None) -> list[ModelId]:
        """Resident models, those needed last first: models without waiting jobs before those with some, and adapters
        before their bases; otherwise in order of name."""
        order = {model: position for position, model in enumerate(self._queue.needed())}
        begun = [running.job for running in self._queue.begun()]
        keep = {needed, adapter} | {job.model for job in begun} | {job.served for job in begun}
        candidates = [model for model in self._ledger.weights.resident() if model not in keep]
        return sorted(candidates, key=lambda model: (-order.get(model, len(order)), model))

    def _abandon(self, models: Iterable[ModelId]) -> bool:
        """Whether memory comes back from models that were being loaded for later."""
        leaving = list(models)
        self._counters.abandoned += self._weights.abandon(leaving)
        return bool(leaving)

    def _spare_pages(self) -> int:
        """The pages that the largest job left in the running group may take."""
        group = self._queue.groups[0]
        shape = self._shape(group.model)
        blocks = max((shape.blocks_for(job.prefill_tokens) for job in group.jobs), default=0)
        return -(-blocks // self._ledger.device.per_slab(shape)) * self._ledger.budget.pages_per_slab

    def _shape(self, model: ModelId) -> KvShape:
        return self._ledger.specs[model].manifest.kv

    def _weight_pages(self, model: ModelId) -> int:
        return self._ledger.budget.weight_pages(self._ledger.specs[model].manifest.image_bytes)
