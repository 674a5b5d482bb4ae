"""Rows of several adapters and of their base share steps, and each row has what it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import ModelSpec, WeightsName
from aegis.core.request import Sampling
from aegis.engine.lora import segments_of
from aegis.engine.protocol import Sampled, StepRow
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models.registry import register
from aegis.models.sources import Source
from tests import adapters, checkpoints
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
    """A base and its adapters in an engine, with the images that they lie in."""

    def __init__(
        self,
        tmp_path: Path,
        model_type: str = "llama",
        *,
        count: int = 2,
        weights: WeightsName = "dense",
        dtype: str = "float32",
        packs: bool = False,
        **changes: object,
    ) -> None:
        self.checkpoint = checkpoints.write(tmp_path / "base", model_type)
        self._arena = Arena()
        self.engine = Seen(self._arena.region)
        self._images = []
        self._cache = tmp_path / "cache"
        source = Source(ModelId("base"), path=str(self.checkpoint))
        base = register(source, dtype=dtype, cache_dir=self._cache, weights=weights, packs=packs)
        assert base
        self.base = base
        self.attach(base)
        targets = TARGETS.get(model_type, adapters.TARGETS)
        self.paths = [
            adapters.write(tmp_path / f"adapter-{n}", self.checkpoint, seed=n, targets=targets, **changes)  # type: ignore[arg-type]
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

    def run(self, wanted: Sequence[ModelId | None], steps: int) -> list[list[torch.Tensor]]:
        """A request for each of these adapters, all in the same steps, the prompts too: the logits of each."""
        rows, found = [], [list[torch.Tensor]() for _ in wanted]
        for number, adapter in enumerate(wanted):
            prompt, request = PROMPTS[number % len(PROMPTS)], RequestId(number)
            blocks = self._arena.take(self.base.manifest.kv, len(prompt) + steps)
            self.engine.start(ModelId("base"), request, prompt, (), GREEDY)
            rows.append(StepRow(request, tuple(prompt), 0, blocks, adapter=adapter))
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


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "phi3", "gpt_oss"])
@pytest.mark.parametrize("rslora", [False, True])
def test_logits_are_those_of_merged_weights(tmp_path: Path, model_type: str, rslora: bool) -> None:
    running = Running(tmp_path, model_type, use_rslora=rslora)
    names = [spec.model for spec in running.specs]
    wanted = [names[0], None, names[1], names[0]]
    found = running.run(wanted, 5)
    models = {name: adapters.merged(running.checkpoint, path) for name, path in zip(names, running.paths, strict=True)}
    base = adapters.AutoModelForCausalLM.from_pretrained(running.checkpoint).eval()
    for number, adapter in enumerate(wanted):
        model = base if adapter is None else models[adapter]
        spread = expected(model, PROMPTS[number], 5)
        assert far(found[number], spread) < 1e-4 * max(1.0, float(spread[0].abs().max()) / 10), (number, adapter)
    assert far(found[0], expected(base, PROMPTS[0], 5)) > 0.1, "the adapter does something"


def test_logits_are_peft_s(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    running = Running(tmp_path, rank=8, alpha=16.0)
    base = adapters.AutoModelForCausalLM.from_pretrained(running.checkpoint).eval()
    model = peft.PeftModel.from_pretrained(base, str(running.paths[1]))
    apart = expected(model, PROMPTS[0], 6)
    found = running.run([running.specs[1].model, running.specs[0].model], 6)
    assert far(found[0], apart) < 1e-4
    assert far(found[0], expected(model.merge_and_unload(), PROMPTS[0], 6)) < 1e-4


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("packs", [False, True])
def test_the_low_rank_part_comes_on_top_of_integers(tmp_path: Path, weights: WeightsName, packs: bool) -> None:
    """As merged into the weights that the integers stand for."""
    from aegis.models.quantising import replace_weights

    running = Running(tmp_path, weights=weights, packs=packs)
    found = running.run([running.specs[0].model, None, running.specs[1].model], 4)
    for number, path in ((0, running.paths[0]), (2, running.paths[1])):
        model = adapters.AutoModelForCausalLM.from_pretrained(running.checkpoint).eval()
        replace_weights(model, weights)
        adapters.merge_into(model, path)
        wanted = expected(model, PROMPTS[number], 4)
        bound = 0.05 if weights == "int8" and packs else 1e-3  # whose inputs are bytes, too
        assert far(found[number], wanted) < bound * max(1.0, float(wanted[0].abs().max()))


def test_sixteen_share_a_step_and_have_what_each_has_alone(tmp_path: Path) -> None:
    running = Running(tmp_path, count=16)
    names = [spec.model for spec in running.specs]
    together = running.run([*names, None], 6)
    for number in (0, 7, 15):
        while number >= len(PROMPTS):
            break
        alone = running.run([None] * number + [names[number]], 6)
        assert far(alone[number], together[number]) < 1e-5


def test_an_adapter_that_left_does_nothing(tmp_path: Path) -> None:
    running = Running(tmp_path)
    before = running.run([None], 3)
    gone = running.specs[0].model
    running.engine.detach(gone)
    assert far(running.run([gone], 3)[0], before[0]) == 0.0
    running.attach(running.adapter(running.paths[0]))
    assert far(running.run([gone], 3)[0], before[0]) > 0.1


def test_an_adapter_without_its_base_is_refused(tmp_path: Path) -> None:
    running = Running(tmp_path, count=1)
    engine = TransformersEngine(Arena().region)
    with pytest.raises(ModelRefused, match="its base 'base' cannot be run here"):
        engine.attach(running.specs[0], 0)


def test_segments_are_ranges_of_tokens() -> None:
    a, b = ModelId("a"), ModelId("b")
    blocks = np.array([0])
    rows = [
        StepRow(RequestId(number), tokens, 0, blocks, adapter=adapter)
        for number, (tokens, adapter) in enumerate([((1, 2), a), ((3,), a), ((4,), None), ((5,), b), ((6, 7), a)])
    ]
    (first, where), (second, other) = segments_of(rows)
    assert (first, second, other) == (a, b, slice(4, 5))
    assert isinstance(where, torch.Tensor) and where.tolist() == [0, 1, 2, 5, 6]
    assert segments_of(rows[:2]) == [(a, slice(0, 3))]
    assert segments_of(rows[2:3]) == []
