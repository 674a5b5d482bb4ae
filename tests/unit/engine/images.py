"""Small random models for the engine's tests: transformers' own as the reference, and the same weights as an image."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from aegis.core.ids import ModelId
from aegis.core.model import EngineName, KvShape, Manifest, ModelSpec, WeightsName, image_name
from aegis.engine.block_table import BlockTable
from aegis.engine.protocol import KvRegion
from aegis.models.kv_probe import Probed, probe
from aegis.models.quantising import replace_weights
from aegis.models.weight_image import write_image


@dataclass(frozen=True)
class Built:
    reference: Any
    spec: ModelSpec
    image: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def base(self) -> int:
        return self.image.ctypes.data

    @property
    def manifest(self) -> Manifest:
        return self.spec.manifest

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        out = self.reference.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return out[0, len(prompt) :].tolist()


def build(
    config: PretrainedConfig,
    directory: Path,
    *,
    std: float = 0.3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    probed: Probed | None = None,
    engine: EngineName = "transformers",
    weights: WeightsName = "dense",
    packs: bool = False,
) -> Built:
    """`probed` is given for models that a probe would refuse before the engine could. `engine` is whose image it is. If
    `weights` are quantised, the reference has those that the integers stand for."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    _randomise(model, std, seed)
    directory.mkdir(parents=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    into = directory / "image"
    into.mkdir()
    if engine == "vllm":
        from aegis.models.vllm_weight_image import write_vllm_image

        model.save_pretrained(directory)
        manifest = write_vllm_image(model, directory.name, directory, into)
    else:
        integers = {} if weights == "dense" else replace_weights(model, weights)
        found = probed or probe(model)
        manifest = write_image(model, found, directory.name, directory, into, packs=packs, integers=integers)
    spec = ModelSpec(ModelId(directory.name), manifest, str(into), str(into / image_name()), str(directory))
    return Built(model, spec, np.fromfile(into / image_name(), dtype=np.uint8))


def _randomise(model: Any, std: float, seed: int) -> None:
    """Weights so large that the next token depends on everything before it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.dim() > 1:
            parameter.data = noise * std
        else:
            parameter.data += noise * 0.1


class Arena:
    """A KV region full of NaN. Its slabs go to shapes, and their blocks to sequences, in random order."""

    def __init__(self, *, slab_bytes: int = 200_004, slabs: int = 100, seed: int = 0, device: str = "cpu") -> None:
        self._random = random.Random(seed)
        self._memory = torch.full((slabs * slab_bytes // 4,), torch.nan, device=device)
        self.region = KvRegion(self._memory.data_ptr(), slabs * slab_bytes, slab_bytes)
        self._slabs = self._random.sample(range(slabs), slabs)
        self._free: dict[KvShape, list[int]] = {}

    def take(self, shape: KvShape, tokens: int) -> BlockTable:
        per_slab = self.region.blocks_per_slab(shape)
        free = self._free.setdefault(shape, [])
        while len(free) < shape.blocks_for(tokens):
            for _ in range(2):
                slab = self._slabs.pop()
                free += range(slab * per_slab, (slab + 1) * per_slab)
            self._random.shuffle(free)
        return np.array([free.pop() for _ in range(shape.blocks_for(tokens))])

    def content(self, shape: KvShape, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a block; CPU only."""
        slab, index = divmod(int(block), self.region.blocks_per_slab(shape))
        start = slab * self.region.slab_bytes + index * shape.block_bytes
        return self._memory.view(torch.uint8).numpy()[start : start + shape.block_bytes]

    def move(self, shape: KvShape, blocks: BlockTable) -> BlockTable:
        """Copies the blocks of a sequence to others, as leaving the device and coming back does."""
        others = self.take(shape, len(blocks) * shape.block_tokens)
        for source, target in zip(blocks, others, strict=True):
            self.content(shape, target)[:] = self.content(shape, source)
            self.content(shape, source)[:] = 0xFF
        return others
