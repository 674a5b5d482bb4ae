"""Our side of a contest in decoding: an engine, a checkpoint's weight image beneath it, KV in scattered blocks."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import EngineName, ModelSpec, WeightsName, image_name
from aegis.core.request import Sampling
from aegis.engine.block_table import BlockTable
from aegis.engine.engines import engine_class
from aegis.engine.protocol import Engine, KvRegion, StepRow
from aegis.models.kv_probe import probe
from aegis.models.quantising import integers_of
from aegis.models.weight_image import write_image

_COMMON = {"vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": False}
HALF_BILLION = "0.5b"
CHECKPOINTS = {
    "tiny": LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **_COMMON,
    ),
    "50m": LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        **_COMMON,
    ),
    HALF_BILLION: LlamaConfig(
        hidden_size=1024,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        **_COMMON | {"vocab_size": 16384},
    ),
}
_SLAB_BYTES = 8 << 20

Filled = list[tuple[int, BlockTable]]
"""First token and blocks of each row."""


def build(checkpoint: str, dtype: str, *, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CHECKPOINTS[checkpoint], dtype=getattr(torch, dtype))
    return model.eval()


def write(
    model: PreTrainedModel, directory: Path, *, engine: EngineName = "transformers", weights: WeightsName = "dense"
) -> ModelSpec:
    """The model as a checkpoint and, in it, an image directory for `engine`, as the registry makes it."""
    if not (directory / "config.json").is_file():
        model.save_pretrained(directory)
    into = directory / f"image-{engine}-{weights}"
    into.mkdir()
    if engine == "vllm":
        from aegis.models.vllm_weight_image import write_vllm_image

        manifest = write_vllm_image(model, "contest", directory, into)
    else:
        integers = {} if weights == "dense" else integers_of(model, weights)
        manifest = write_image(model, probe(model), "contest", directory, into, packs=True, integers=integers)
    return ModelSpec(ModelId(directory.name), manifest, str(into), str(into / image_name()), str(directory))


class Side:
    """`rows` sequences of up to `tokens` tokens of one model, whose weights may be replaced."""

    def __init__(self, spec: ModelSpec, *, rows: int, tokens: int) -> None:
        self.spec = spec
        self._image = _memory(spec.manifest.image_bytes)
        self._image[:] = np.fromfile(spec.image_path, dtype=np.uint8)
        self._shape = spec.manifest.kv
        self._row_blocks = self._shape.blocks_for(tokens)
        self._per_slab = _SLAB_BYTES // self._shape.block_bytes
        slabs = -(-rows * self._row_blocks // self._per_slab)
        self._slabs = _memory(slabs * _SLAB_BYTES).reshape(slabs, _SLAB_BYTES)
        region = KvRegion(self._slabs.ctypes.data, self._slabs.nbytes, _SLAB_BYTES)
        self._engine: Engine = engine_class(spec.manifest.engine)(region)
        self._engine.attach(spec, self._image.ctypes.data)
        self._adapters: list[ModelId | None] = [None] * rows
        self._adapter_images: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._blocks: BlockTable = torch.randperm(slabs * self._per_slab).numpy()

    @property
    def weight_bytes(self) -> int:
        return self._image.nbytes

    def add(self, spec: ModelSpec) -> None:
        """Another model in the same weight memory, of at most as many bytes and the same KV shape."""
        assert spec.manifest.image_bytes <= self._image.nbytes and spec.manifest.kv == self._shape
        self._engine.attach(spec, self._image.ctypes.data)

    def add_adapter(self, spec: ModelSpec) -> None:
        """Attaches an adapter beside the model, in memory of its own."""
        image = _memory(spec.manifest.image_bytes)
        image[:] = np.fromfile(spec.image_path, dtype=np.uint8)
        self._adapter_images.append(image)
        self._engine.attach(spec, image.ctypes.data)

    def adapt(self, adapters: Sequence[ModelId | None]) -> None:
        """From now on the first rows are run with these adapters, and the others with none."""
        self._adapters[:] = [*adapters, *[None] * (len(self._adapters) - len(adapters))]

    def replace(self, spec: ModelSpec, image: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Switches the model."""
        self._image[: len(image)] = image
        self.spec = spec

    def fill(self, prompt: list[int], batch: int) -> Filled:
        """KV of the prompt in every row: one is prefilled, the others are copies."""
        rows = [self._blocks[row * self._row_blocks : (row + 1) * self._row_blocks] for row in range(batch)]
        self._start(0)
        (sampled,) = self._engine.step(self.spec.model, [StepRow(RequestId(0), prompt, 0, rows[0])])
        assert sampled
        for row in rows[1:]:
            for source, target in zip(rows[0], row, strict=True):
                self._bytes(target)[:] = self._bytes(source)
        return [(sampled.token.id, row) for row in rows]

    def prefill(self, prompt: list[int], row: int) -> None:
        """A whole prompt, in the blocks of this row."""
        self._start(row)
        blocks = self._blocks[row * self._row_blocks : (row + 1) * self._row_blocks]
        self._engine.step(self.spec.model, [StepRow(RequestId(row), prompt, 0, blocks)])

    def run(self, rows: Filled, context: int, tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds that all tokens but the first take, and all tokens of each row."""
        out = [[first] for first, _ in rows]
        for row in range(len(rows)):
            self._start(row)
        start = time.perf_counter()
        for step in range(tokens - 1):
            self._step(rows, out, context + step)
        return time.perf_counter() - start, out

    def _step(self, rows: Filled, out: Sequence[list[int]], position: int) -> None:
        batch = [
            StepRow(RequestId(row), out[row][-1:], position, blocks, adapter=self._adapters[row])
            for row, (_, blocks) in enumerate(rows)
        ]
        for tokens, sampled in zip(out, self._engine.step(self.spec.model, batch), strict=True):
            assert sampled
            tokens.append(sampled.token.id)

    def _bytes(self, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        slab, index = divmod(block, self._per_slab)
        return self._slabs[slab, index * self._shape.block_bytes :][: self._shape.block_bytes]

    def _start(self, row: int) -> None:
        self._engine.start(self.spec.model, RequestId(row), (), (), Sampling(max_tokens=1 << 20, temperature=0.0))


def _memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros from the beginning of a page on, as an instance's memory is. numpy's own begins 16 bytes behind one, and
    products with weights of which every other vector lies in two cache lines take half as long again."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
