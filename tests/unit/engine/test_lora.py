"""Rows of several adapters and of their base share steps, and each row has what it has alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import WeightsName
from aegis.engine.lora import segments_of
from aegis.engine.protocol import StepRow
from aegis.engine.transformers_engine import TransformersEngine
from tests import adapters
from tests.long_forms import first_of
from tests.unit.engine.adapted import PROMPTS, Running, expected, far
from tests.unit.engine.images import Arena


@pytest.mark.parametrize("model_type", ["llama", "odd", "gpt2", "gemma2", "phi3", "gpt_oss"])
@pytest.mark.parametrize("rslora", first_of(1, [False, True]))
def test_logits_are_those_of_merged_weights(tmp_path: Path, model_type: str, rslora: bool) -> None:
    """Also where compiled code does not take the widths."""
    if model_type == "odd":
        running = Running(tmp_path, sizes={"hidden_size": 72, "intermediate_size": 100}, use_rslora=rslora)
    else:
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
        alone = running.run([None] * number + [names[number]], 6)
        assert far(alone[number], together[number]) < 1e-5


def test_an_adapter_whose_values_overflow_spoils_no_row_but_its_own(tmp_path: Path) -> None:
    """Of a width that compiled code does not take: all rows are multiplied by all adapters there."""
    running = Running(tmp_path, count=2, sizes={"hidden_size": 72, "intermediate_size": 100})
    names = [spec.model for spec in running.specs]
    alone = running.run([names[0]], 4)
    tensors = adapters.tensors_of(running.paths[1])
    loud = {name: tensor.sign() * 3e38 if "lora_A" in name else tensor for name, tensor in tensors.items()}
    running.engine.detach(names[1])
    adapters.replace_tensors(running.paths[1], loud)
    running.attach(running.adapter(running.paths[1]))
    together = running.run(names, 4)
    assert far(together[0], alone[0]) < 1e-5
    assert not together[1][0].isfinite().all()


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
