"""What is in the memory of a device: dictionaries that an instance's copies and steps read and write.

A broken rule shows: only granted pages are mapped, at one place, and only wiped ones given back, what is in a page is
lost when another owner maps it, the next token follows from what is found in the KV blocks, and a step runs only on
weights that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aegis.core.block_runs import BlockCopy, block_ids
from aegis.core.effects import (
    CopyBlocks,
    LoadWeights,
    MapKv,
    MapWeights,
    MoveBlocks,
    Row,
    Run,
    StreamName,
    UnmapKv,
    UnmapWeights,
)
from aegis.core.ids import BlockId, InstanceId, ModelId, PageRun, RequestId, SlabId
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import Job, KeptPrefix, Token
from aegis.sim.faults.fake_models import BLOCK_TOKENS, next_token
from aegis.sim.faults.state import Action, Content, FaultWorldState, slab_of

Pages = tuple[int, ...]


class DeviceMemory:
    """That of one instance. `specs` are the models it has bound. Where node and proxy are `parted`, host slabs that are
    read may change hands."""

    def __init__(
        self,
        state: FaultWorldState,
        instance: InstanceId,
        specs: Callable[[], Mapping[ModelId, ModelSpec]],
        parted: bool,
    ) -> None:
        self._state = state
        self._instance = instance
        self._specs = specs
        self._parted = parted
        self._kv: dict[tuple[KvShape, BlockId], Content] = {}
        self._slab_pages: dict[SlabId, Pages] = {}
        self._weight_pages: dict[ModelId, Pages] = {}
        self._loaded: dict[int, ModelId] = {}
        self._prefixes: dict[RequestId, tuple[KvShape, set[BlockId]]] = {}  # kept by the host when looked up
        self._runs: dict[int, tuple[set[ModelId], KvShape, set[BlockId]]] = {}  # under way, by lane

    # --- pages --------------------------------------------------------------------------------------------------------

    def accept(self, runs: Sequence[PageRun]) -> None:
        pages = pages_of(runs)
        assert not self._state.dirty & set(pages), "another one's bytes come into reach"
        assert not self._state.pages.keys() & set(pages), "a page has two owners"
        self._state.pages.update(dict.fromkeys(pages, self._instance))

    def wipe(self, runs: Sequence[PageRun]) -> None:
        pages = pages_of(runs)
        assert not self._mapped_pages() & set(pages), "wiped while it is mapped"
        self._state.dirty.difference_update(pages)

    def revoke(self, runs: Sequence[PageRun]) -> None:
        pages = pages_of(runs)
        assert not self._mapped_pages() & set(pages) and not self._state.dirty & set(pages)
        for page in pages:
            del self._state.pages[page]

    def map_kv(self, effect: MapKv) -> None:
        self._slab_pages[effect.slab] = self._claim(effect.runs)

    def unmap_kv(self, effect: UnmapKv) -> None:
        for _, shape, blocks in self._runs.values():
            assert effect.slab not in {slab_of(shape, block) for block in blocks}, "unmapped under a run"
        del self._slab_pages[effect.slab]
        for key in [key for key in self._kv if slab_of(*key) == effect.slab]:
            del self._kv[key]

    def map_weights(self, effect: MapWeights) -> None:
        self._weight_pages[effect.model] = self._claim(effect.runs)

    def unmap_weights(self, effect: UnmapWeights) -> None:
        assert all(effect.model not in models for models, _, _ in self._runs.values()), "weights leave under a run"
        del self._weight_pages[effect.model]

    def weights_mapped(self, model: ModelId) -> bool:
        return model in self._weight_pages

    def _claim(self, runs: Sequence[PageRun]) -> Pages:
        """Mapped at one place at a time; whatever was in the pages is gone."""
        pages = pages_of(runs)
        assert not self._mapped_pages() & set(pages), "a page is mapped twice"
        assert all(self._state.pages.get(page) == self._instance for page in pages), "a page that was not granted"
        self._state.dirty.update(pages)
        for page in pages:
            self._loaded.pop(page, None)
        return pages

    def _mapped_pages(self) -> set[int]:
        return {page for held in (self._slab_pages, self._weight_pages) for run in held.values() for page in run}

    # --- copies -------------------------------------------------------------------------------------------------------

    def move(self, effect: MoveBlocks) -> None:
        for source, target in pairs_of(effect.copies):
            self._check_mapped(effect.shape, source)
            self._check_mapped(effect.shape, target)
            self._kv[effect.shape, target] = list(self._kv.get((effect.shape, source), []))

    def load(self, effect: LoadWeights) -> tuple[int, Action]:
        """Of how many pages the load is, and what it does at its end: from the model cache or, where the image is not
        there, from disk."""
        model, extents = effect.model, pages_of(effect.cached)
        pages = self._weight_pages[model]

        def end() -> None:
            assert self._weight_pages.get(model) == pages, f"{model} was unmapped while it was loading"
            found = {self._state.images.get(extent) for extent in extents}
            assert found <= {model}, f"{model} was loaded from where {found} is cached"
            self._loaded.update(dict.fromkeys(pages, model))

        return len(pages), end

    def may_read(self, job: Job, prefix: KeptPrefix) -> None:
        """Whatever becomes of its slabs."""
        if spec := self._specs().get(job.model):
            self._prefixes[job.request] = spec.manifest.kv, set(block_ids(prefix.blocks))

    def read_no_more(self, request: RequestId) -> None:
        self._prefixes.pop(request, None)

    def copy(self, effect: CopyBlocks) -> Action:
        """What the copy does at its end."""
        leased, swaps_out = self._leases(effect), effect.stream is StreamName.SWAP_OUT
        touched = {a if swaps_out else b for a, b in pairs_of(effect.copies)}
        for _, shape, blocks in self._runs.values():
            assert shape != effect.shape or not blocks & touched, "KV of a run under way is copied"

        def end() -> None:
            now = {slab: self._state.leased[slab] for slab in leased}
            assert leased == now, "a host slab has another owner, and is still copied"
            out = effect.stream is StreamName.SWAP_OUT
            source, target = (self._kv, self._state.host) if out else (self._state.host, self._kv)
            for a, b in pairs_of(effect.copies):
                self._check_mapped(effect.shape, a if out else b)
                target[effect.shape, b] = list(source.get((effect.shape, a), []))

        return end

    def _leases(self, effect: CopyBlocks) -> dict[SlabId, int]:
        """Leases of the host slabs that a copy reads or writes: they may not change hands under it. There are two
        exceptions: an instance may read KV that it was to adopt from a lost one until the proxy, which ignores the
        result, takes that back; and kept KV for later prompts is read at the reader's own risk, be it still kept when
        the copy begins or no longer."""
        out = effect.stream is StreamName.SWAP_OUT
        if self._parted and not out:
            return {}
        blocks = {b if out else a for a, b in pairs_of(effect.copies)}
        if not out and any(blocks <= prefix for shape, prefix in self._prefixes.values() if shape == effect.shape):
            return {}
        slabs = {slab_of(effect.shape, block) for block in blocks}
        return {slab: self._state.leased[slab] for slab in sorted(slabs)}

    # --- runs ---------------------------------------------------------------------------------------------------------

    def run_begins(self, run: Run) -> None:
        """Until it has ended, nothing else may touch its blocks, nor its weights leave."""
        assert run.steps > 0, "a run without room for a step"
        shape = self._specs()[run.model].manifest.kv
        blocks = {block for row in run.rows for block in block_ids(row.blocks)}
        assert len(blocks) == sum(len(list(block_ids(row.blocks))) for row in run.rows), "rows share blocks"
        for _, other, others in self._runs.values():
            assert other != shape or not blocks & others, "two runs have the same blocks"
        self._runs[run.lane] = {run.model, *[row.job.served for row in run.rows]}, shape, blocks

    def run_ended(self, lane: int) -> None:
        del self._runs[lane]

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, model: ModelId, rows: Sequence[Row]) -> list[Token | None]:
        """The token of each row that samples."""
        shape = self._loaded_shape(model)
        for row in rows:
            assert row.job.model == model and self._loaded_shape(row.job.served) == shape
        return [self._row(shape, row) for row in rows]

    def _row(self, shape: KvShape, row: Row) -> Token | None:
        blocks = list(block_ids(row.blocks))[: -(-row.stop // BLOCK_TOKENS)]
        tokens = (*row.job.prompt, *row.job.sent)[row.start : row.stop] if row.token is None else (row.token,)
        for position, token in enumerate(tokens, row.start):
            made = token if row.job.adapter is None else (token, row.job.adapter)
            self._block(shape, blocks[position // BLOCK_TOKENS])[position % BLOCK_TOKENS] = made
        if not row.samples:
            return None
        found = [token for block in blocks for token in self._block(shape, block)]
        return Token(next_token(found[: row.stop]))

    def _loaded_shape(self, model: ModelId) -> KvShape:
        """Of KV of a model whose weights are there."""
        assert all(self._loaded.get(page) == model for page in self._weight_pages[model]), f"{model} is not loaded"
        return self._specs()[model].manifest.kv

    def _check_mapped(self, shape: KvShape, block: BlockId) -> None:
        assert slab_of(shape, block) in self._slab_pages, "unmapped memory is touched"

    def _block(self, shape: KvShape, block: BlockId) -> Content:
        self._check_mapped(shape, block)
        content = self._kv.setdefault((shape, block), [])
        content += [None] * (BLOCK_TOKENS - len(content))
        return content


def pairs_of(copies: Sequence[BlockCopy]) -> list[tuple[BlockId, BlockId]]:
    return [(BlockId(a + at), BlockId(b + at)) for a, b, count in copies for at in range(count)]


def pages_of(runs: Sequence[PageRun]) -> Pages:
    return tuple(page for run in runs for page in range(run.start, run.stop))
