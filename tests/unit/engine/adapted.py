"""A base and its adapters in an engine, and what they should compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import ModelSpec, WeightsName
from aegis.core.request import Sampling
from aegis.engine.protocol import Sampled, StepRow
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models.sources import Source
from tests import adapters, checkpoints
from tests.registering import register
from tests.unit.engine.images import Arena

GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)
PROMPTS = ([5, 9, 200, 31, 7], [17, 3], [100, 101, 102, 103, 104, 105, 106, 107, 108], [44])
TARGETS = {"gpt2": ("c_attn", "c_proj", "c_fc"), "phi3": ("qkv_proj", "down_proj"), "gpt_oss": ("q_proj", "o_proj")}


class Seen(TransformersEngine):
    """Keeps the logits of the last step, by request."""

    def _sampled(self, rows: Sequence[StepRow], asked: Sequence[int], logits: torch.Tensor) -> list[Sampled | None]:
        self.logits = {rows[at].request: logits[place].clone() for place, at in enumerate(asked)}
        return super()._sampled(rows, asked, logits)


class Running:
    """With the images that they lie in. `sizes` are the base's, `changes` those of adapters' configurations."""

    def __init__(
        self,
        tmp_path: Path,
        model_type: str = "llama",
        *,
        count: int = 2,
        weights: WeightsName = "dense",
        dtype: str = "float32",
        packs: bool = False,
        sizes: Mapping[str, int] | None = None,
        **changes: object,
    ) -> None:
        self.checkpoint = checkpoints.write(tmp_path / "base", model_type, **sizes or {})
        self._arena = Arena()
        self.engine = Seen(self._arena.region)
        self._images = []
        self._cache = tmp_path / "cache"
        source = Source(ModelId("base"), path=str(self.checkpoint))
        base = register(source, dtype=dtype, cache_dir=self._cache, weights=weights, packs=packs)
        assert base
        self.base = base
        self.attach(base)
        changes.setdefault("targets", TARGETS.get(model_type, adapters.TARGETS))
        self.paths = [
            adapters.write(tmp_path / f"adapter-{n}", self.checkpoint, seed=n, **changes)  # type: ignore[arg-type]
            for n in range(count)
        ]
        self.specs = [self.adapter(path) for path in self.paths]
        for spec in self.specs:
            self.attach(spec)

    def adapter(self, path: Path) -> ModelSpec:
        source = Source(ModelId(path.name), path=str(path), adapter=True)
        spec = register(source, dtype="auto", cache_dir=self._cache, base=self.base)
        assert spec
        return spec

    def attach(self, spec: ModelSpec) -> None:
        image = np.fromfile(spec.image_path, dtype=np.uint8)
        self._images.append(image)
        self.engine.attach(spec, image.ctypes.data)

    def begun(self, request: RequestId, prompt: Sequence[int], adapter: ModelId | None, tokens: int) -> StepRow:
        """A prompt that is to be run next, with room for so many `tokens` in all."""
        self.engine.start(ModelId("base"), request, prompt, (), GREEDY)
        blocks = self._arena.take(self.base.manifest.kv, tokens)
        return StepRow(request, tuple(prompt), 0, blocks, adapter=adapter)

    def run(self, wanted: Sequence[ModelId | None], steps: int) -> list[list[torch.Tensor]]:
        """A request for each of these adapters, all in the same steps, the prompts too: the logits of each."""
        rows, found = [], [list[torch.Tensor]() for _ in wanted]
        for number, adapter in enumerate(wanted):
            prompt = PROMPTS[number % len(PROMPTS)]
            rows.append(self.begun(RequestId(number), prompt, adapter, len(prompt) + steps))
        for _ in range(steps):
            sampled = self.engine.step(ModelId("base"), rows)
            for number, each in enumerate(sampled):
                assert each
                found[number].append(self.engine.logits[RequestId(number)])
                row = rows[number]
                rows[number] = StepRow(row.request, (each.token.id,), row.stop, row.blocks, adapter=row.adapter)
        for number in range(len(wanted)):
            self.engine.stop(RequestId(number))
        return found


@torch.inference_mode()
def expected(model: torch.nn.Module, prompt: list[int], steps: int) -> list[torch.Tensor]:
    tokens, found = list(prompt), []
    for _ in range(steps):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        found.append(logits)
        tokens.append(int(logits.argmax()))
    return found


def far(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
