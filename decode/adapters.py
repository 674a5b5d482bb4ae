"""The adapters of the models of a decode instance's batches: their weights come beside those of their base, for the
sequences that want them, and a sequence has no step before its own are there."""

from __future__ import annotations

from collections.abc import Callable, Container

from aegis.core.ids import ModelId
from decode.sequences import Sequence
from decode.worklist import Batch, WorkList
from memory.ledger import Ledger


class Adapters:
    """The adapters that an instance's sequences need: whether they are on the device, and what room they take."""

    def __init__(self, ledger: Ledger, work: WorkList) -> None:
        self._ledger = ledger
        self._work = work

    def there(self, sequence: Sequence) -> bool:
        """Whether the sequence lacks no adapter on the device."""
        adapter = sequence.job.adapter
        return adapter is None or self._ledger.weights.is_resident(adapter)

    def wanted(self, models: Container[ModelId | None] | None = None) -> set[ModelId]:
        """Adapters that sequences of these models are for; None: of all."""
        if not self._ledger.adapters:
            return set()
        batches = [batch for batch in self._work.batches if models is None or batch.model in models]
        return {s.job.adapter for batch in batches for s in batch.sequences if s.job.adapter is not None}

    def places(self) -> dict[ModelId, int]:
        """For each adapter that is wanted, the place of the first batch that needs it in the order of turns."""
        places: dict[ModelId, int] = {}
        if self._ledger.adapters:
            for place, batch in enumerate(self._work.upcoming()):
                for sequence in batch.sequences:
                    if sequence.job.adapter is not None:
                        places.setdefault(sequence.job.adapter, place)
        return places

    def pages(self, sequence: Sequence) -> int:
        """The pages that the sequence's adapter takes; none if it is there or on its way, or if there is no adapter."""
        adapter, weights = sequence.job.adapter, self._ledger.weights
        if adapter is None or weights.is_resident(adapter) or weights.is_loading(adapter):
            return 0
        return self._ledger.budget.weight_pages(self._ledger.specs[adapter].manifest.image_bytes)

    def kv_pages(self, sequence: Sequence) -> int:
        """Free pages that its KV takes before its next step."""
        return self._ledger.kv_pages(sequence.shape, sequence.blocks_now() - sequence.held)

    def bring_in(self, batch: Batch, due: list[Sequence], load: Callable[[ModelId, int], bool]) -> None:
        """Loads the adapters that the batch's sequences lack, first those of sequences that are `due`; a sequence is
        refused if there is no room for its adapter. Pages are spared for the KV of that sequence and of the first one
        that is due: if adapters filled the device, no sequence could go on. Once a sequence that is due has been
        refused, nothing comes in for those that are not: that would take the room that is made for it, and leave for
        it, again and again."""
        lacking = [s for s in batch.sequences if self.pages(s)] if self._ledger.adapters else []
        short = False
        for sequence in sorted(lacking, key=lambda s: s not in due):
            adapter = sequence.job.adapter
            if adapter is not None and self.pages(sequence):  # or one before has the same
                spare = max([self.kv_pages(each) for each in (sequence, *due[:1])])
                sequence.refused = (short and sequence not in due) or not load(adapter, spare)
                short = short or sequence.refused
