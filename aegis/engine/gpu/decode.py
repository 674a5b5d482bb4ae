"""Decode steps on a GPU: inputs of fixed shape at fixed addresses, attention by the Triton kernels, CUDA graphs.

Not run on a GPU; on CPU tensors, with Triton's interpreter and without graphs, it is tested against `paged_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aegis.core.ids import ModelId
from aegis.engine.gpu.cuda_graphs import CudaRecorder, DecodeGraphs
from aegis.engine.gpu.decode_inputs import DecodeInputs, Tables
from aegis.engine.gpu.triton_attention import append, attend, check_launches, splits_for
from aegis.engine.paged_attention import Kind, Step
from aegis.engine.protocol import StepRow
from aegis.engine.tensor_views import KvViews

Model = Callable[[Step, torch.Tensor, torch.Tensor], torch.Tensor]
"""A forward pass in a step: token ids and positions, `[batch, tokens]` each, to logits `[batch, kept, vocab]`."""


class TableStep:
    """One token for each row, wherever `tables` says its KV is. Implements `Step`."""

    def __init__(self, views: KvViews, tables: Tables, processors: int) -> None:
        self.attended = 0
        self._views = views
        self._tables = tables
        self._processors = processors

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind
    ) -> torch.Tensor:
        cache = self._views.layers[layer]
        rows, query_heads, _, key_dim = query.shape
        append(cache, self._tables, key.reshape(rows, -1), value.reshape(rows, -1))
        splits = splits_for(rows, cache.heads, self._processors)
        return attend(cache, self._tables, query.reshape(rows, query_heads, key_dim), kind, splits)[:, None]


class GpuDecoder:
    """Runs decode steps of all models of an engine. `graphs` None: every step is run as it is."""

    def __init__(self, device: torch.device, *, graphs: DecodeGraphs | None = None) -> None:
        self._inputs = DecodeInputs(device)
        self.graphs = graphs
        cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1

    @classmethod
    def on_cuda(cls, device: torch.device) -> GpuDecoder:
        """Raises UserError if Triton cannot launch kernels on this machine."""
        check_launches()
        return cls(device, graphs=DecodeGraphs(CudaRecorder(device)))

    def decode(self, model: ModelId, views: KvViews, run: Model, rows: Sequence[StepRow]) -> torch.Tensor:
        """Logits `[rows, vocab]`, good until the next step."""
        parts = list(self._inputs.parts(rows, views.block_tokens))
        if len(parts) == 1:
            return self._step(model, views, run, rows)
        return torch.cat([self._step(model, views, run, part).clone() for part in parts])

    def beside(self, views: KvViews, rows: Sequence[StepRow]) -> TableStep | None:
        """The attention of these rows beside others, in a step that is not recorded; None if they do not fit. Good
        until the next step."""
        if len(list(self._inputs.parts(rows, views.block_tokens))) > 1:
            return None
        self._inputs.load(rows, views)
        return TableStep(views, self._inputs.tables(len(rows)), self._processors)

    def drop(self, model: ModelId) -> None:
        if self.graphs is not None:
            self.graphs.drop(model)

    def _step(self, model: ModelId, views: KvViews, run: Model, rows: Sequence[StepRow]) -> torch.Tensor:
        bucket = self._inputs.load(rows, views)

        def forward() -> torch.Tensor:
            step = TableStep(views, self._inputs.tables(bucket), self._processors)
            return run(step, self._inputs.tokens(bucket), self._inputs.positions(bucket))[:, -1]

        logits = forward() if self.graphs is None else self.graphs.run(model, bucket, forward)
        return logits[: len(rows)]
