"""The vLLM backend: its model classes and attention kernels under our loop, weights and KV in memory of ours.

A model's image holds the weights as vLLM's loader leaves them (`weights`); `attach` builds the modules without bytes
and makes their tensors views of the weight range, for life. Blocks of KV have vLLM's layout within and ours without:
every layer sees the whole region through one stride, as `KvViews` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.request import Token
from aegis.engine.block_table import BlockTable
from aegis.engine.passes import PASS_TOKENS, passes
from aegis.engine.protocol import KvRegion, Sampled, StepRow
from aegis.engine.sampler import PROMPT_CHUNK_TOKENS, Sampler
from aegis.engine.sampling_engine import SamplingEngine
from aegis.engine.tensor_views import KvViews, LayerViews, check_bound
from aegis.engine.vllm import adapter
from aegis.engine.vllm.weights import bind

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Attached:
    attending: adapter.Attending
    views: KvViews


class VllmEngine(SamplingEngine):
    """Implements `Engine`. `kv` is the device's KV region. Raises UserError if vLLM cannot be used."""

    def __init__(self, kv: KvRegion, *, device: str = "cpu", sampler: Sampler | None = None) -> None:
        super().__init__(sampler)
        self._kv = kv
        self._device = torch.device(device)
        if adapter.on_cpu() != (self._device.type == "cpu"):
            built = "CPUs" if adapter.on_cpu() else "GPUs"
            raise UserError(f"the vLLM that is installed is built for {built}, the device is {device}", param="engine")
        self._pass_tokens = PASS_TOKENS[self._device.type]
        self._models: dict[ModelId, _Attached] = {}
        self._alone = Lock()  # a step tells vLLM of its batch, and attaching of its configuration, by globals
        self._prepared: dict[tuple[ModelId, str], Any] = {}  # configurations, by name and fingerprint

    def prepare(self, spec: ModelSpec) -> None:
        """Configures only: building changes torch's default dtype, which steps in another thread would notice."""
        self._prepared[spec.model, spec.manifest.fingerprint] = _configure(spec)

    def discard(self, spec: ModelSpec) -> None:
        self._prepared.pop((spec.model, spec.manifest.fingerprint), None)

    def attach(self, spec: ModelSpec, weights_base: int) -> None:
        assert spec.model not in self._models and spec.manifest.engine == "vllm"
        config = self._prepared.pop((spec.model, spec.manifest.fingerprint), None) or _configure(spec)
        with self._alone:
            self._attach(spec, weights_base, config)

    def _attach(self, spec: ModelSpec, weights_base: int, config: Any) -> None:
        model = adapter.skeleton(config)
        bind(model, spec, weights_base, self._device)
        attending = adapter.Attending(config, model, self._device)
        views = KvViews(self._kv, spec.manifest.kv, self._device)
        attending.bind([_page(layer) for layer in views.layers])
        check_bound(model, spec.model)
        self._models[spec.model] = _Attached(attending, views)
        self._sampler.grammars.add(spec)

    def detach(self, model: ModelId) -> None:
        self._models.pop(model, None)
        self._sampler.grammars.remove(model)

    def extends(self, model: ModelId) -> bool:
        return True

    @torch.inference_mode()
    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        with self._alone:
            return self._step(model, rows)

    def _step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        first, sampled = rows[0], list[Sampled | None]([None] * len(rows))
        reports = first.start == 0 and self._sampler.wants_prompt(first.request)
        assert not reports or (len(rows) == 1 and first.samples)
        prompt = list[Token]()
        for parts in passes(rows, self._pass_tokens):
            parts.sort(key=lambda part: len(part.row.tokens) > 1)  # vLLM wants rows that decode before others
            last = parts[-1].row
            following = first.tokens[last.start + 1 : last.stop + 1] if reports else ()
            asked, logits = self._run(model, [part.row for part in parts], following, prompt)
            tokens = self._sampler.sample([parts[place].row.request for place in asked], logits) if asked else ()
            for place, token in zip(asked, tokens, strict=True):
                at, row = parts[place]
                sampled[at] = Sampled(token, tuple(prompt), self._sampler.problem(row.request))
        return sampled

    def _run(
        self, model: ModelId, rows: Sequence[StepRow], following: Sequence[int], prompt: list[Token]
    ) -> tuple[list[int], torch.Tensor]:
        """The rows that sample, and their logits `[those rows, vocab]`. The tokens `following` those of the one row are
        reported to `prompt`."""
        attending, views = self._models[model].attending, self._models[model].views
        batch = _batch(
            views,
            [token for row in rows for token in row.tokens],
            [row.start for row in rows],
            [row.stop for row in rows],
            [row.blocks for row in rows],
        )
        asked = [place for place, row in enumerate(rows) if row.samples]
        if batch.most_new == 1:
            logits = attending.next_logits(batch)
            return asked, logits if len(asked) == len(rows) else logits[asked]
        states = attending.hidden(batch)
        for begin in range(0, len(following), PROMPT_CHUNK_TOKENS):
            there = following[begin : begin + PROMPT_CHUNK_TOKENS]
            logits = attending.logits(states[begin : begin + len(there)])
            prompt += self._sampler.prompt_logprobs(rows[0].request, logits, there)
        logits = attending.logits(states[batch.starts[1:].long()[asked] - 1]) if asked else states
        if not asked and logits.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # nothing else waits for the KV that was written
        return asked, logits


def _batch(
    views: KvViews,
    ids: Sequence[int],
    first: Sequence[int],
    lengths: Sequence[int],
    blocks: Sequence[BlockTable],
) -> adapter.Batch:
    """Of all `ids`: row r's are those of positions `[first[r], lengths[r])`. Blocks that are begun are cleared."""
    begins, ends = np.array(first), np.array(lengths)
    new, held = ends - begins, -(-ends // views.block_tokens)
    if len(ids) == len(new):  # one each
        starts, owner, positions = np.arange(len(new) + 1), np.arange(len(new)), begins
    else:
        starts = np.concatenate(([0], new.cumsum()))
        owner = np.repeat(np.arange(len(new)), new)
        positions = np.arange(starts[-1]) - starts[owner] + begins[owner]
    table = _table(views, blocks, held)
    units = table[owner, positions // views.block_tokens]
    offsets = positions % views.block_tokens
    _clear(views, units[offsets == 0])
    return adapter.Batch(
        ids=torch.from_numpy(np.array(ids)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts.astype(np.int32)),
        lengths=torch.from_numpy(ends.astype(np.int32)),
        slots=torch.from_numpy(units * views.block_tokens + offsets),
        blocks=torch.from_numpy(table.astype(np.int32)),
        longest=int(ends.max()),
        most_new=int(new.max()),
    )


def _clear(views: KvViews, units: _Numbers) -> None:
    """Blocks that are begun: the kernels multiply what lies behind a sequence's end by nothing, and another model may
    have left NaNs there."""
    for unit in units.tolist():
        views.blocks[unit].zero_()


def _page(layer: LayerViews) -> torch.Tensor:
    """`[units, heads, block_tokens, key_dim + value_dim]`, over the same memory: what is where within is vLLM's."""
    tokens, width = layer.keys.shape[1], layer.key_dim + layer.value_dim
    shape = (len(layer.values), layer.heads, tokens, width)
    return layer.keys.as_strided(shape, (layer.keys.stride(0), tokens * width, width, 1))


def _table(views: KvViews, blocks: Sequence[BlockTable], held: _Numbers) -> _Numbers:
    """`[rows, most blocks]`: where each block of each row lies, 0 behind its last."""
    table = np.zeros((len(held), held.max()), dtype=np.int64)
    own = np.concatenate([row[:count] for row, count in zip(blocks, held.tolist(), strict=True)])
    table[np.arange(held.max()) < held[:, None]] = views.units(own)
    return table


def _configure(spec: ModelSpec) -> Any:
    manifest = spec.manifest
    return adapter.configure(
        Path(spec.directory),
        dtype=manifest.dtype,
        context_tokens=manifest.context_tokens,
        block_tokens=manifest.kv.block_tokens,
    )
