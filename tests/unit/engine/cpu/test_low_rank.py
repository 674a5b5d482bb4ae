"""What adapters add in compiled code, by itself and in decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import WeightsName
from aegis.engine.cpu.library import library
from aegis.engine.cpu.low_rank import Changes, LowRank, add_changes, takes
from aegis.engine.protocol import StepRow
from aegis.engine.tensor_views import dtype_named
from aegis.models.quantising import replace_weights
from tests import adapters
from tests.long_forms import first_of
from tests.unit.engine.adapted import PROMPTS, Running, expected, far

pytestmark = pytest.mark.skipif(library() is None, reason="not compiled here, or not for this processor")

A, B = ModelId("a"), ModelId("b")
COLUMNS, RESULTS = 176, 80
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _low_rank(rank: int, dtype: torch.dtype, seed: int) -> LowRank:
    draws = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, COLUMNS, generator=draws), torch.randn(rank, RESULTS, generator=draws)
    return LowRank(down.to(dtype), up.to(dtype), 0.3)


def _x_and_y(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(9)
    x, y = (torch.randn(rows, width, generator=draws).to(dtype) for width in (COLUMNS, RESULTS))
    return x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 7, 8, 21, 512])
def test_it_is_scale_b_a_x(rank: int, dtype: torch.dtype) -> None:
    one, other = _low_rank(rank, dtype, 1), _low_rank(rank + 3 if rank < 512 else rank, dtype, 2)
    changes = Changes(["first", "second"])
    changes.add(A, {"second": one, "first": other})
    changes.add(B, {"second": other})
    rows = changes.of_rows([A, None, B, A])
    x, y = _x_and_y(4, dtype)
    got = y.clone()
    assert rows is not None and takes(x, got)
    add_changes(rows, 1, x, got)
    assert torch.equal(got[1], y[1])
    for row, made in ((0, one), (2, other), (3, one)):
        inner = (made.down.double() @ x[row].double()).to(dtype).double()
        added = made.scale * (inner @ made.up.double())
        largest = float((y[row].double() + added).abs().max())
        off = float((got[row].double() - y[row].double() - added).abs().max())
        assert off < largest * (2**-8 if dtype == torch.bfloat16 else 1e-5), row


def test_a_layer_that_no_adapter_changes_stays() -> None:
    changes = Changes(["first", "second"])
    second = _low_rank(8, torch.float32, 1)
    changes.add(A, {"second": second})
    rows = changes.of_rows([A, A])
    x, y = _x_and_y(2, torch.float32)
    got = y.clone()
    assert rows is not None
    add_changes(rows, 0, x, got)
    assert torch.equal(got, y)
    assert changes.of_rows([None, B]) is None


def test_threads_and_other_rows_change_nothing() -> None:
    changes = Changes(["layer"])
    one, other = _low_rank(8, torch.bfloat16, 1), _low_rank(8, torch.bfloat16, 2)
    changes.add(A, {"layer": one})
    changes.add(B, {"layer": other})
    x, y = _x_and_y(5, torch.bfloat16)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for adapters_of_rows in ([A, B, A, None, B], [None, None, A, None, None]):
                rows, got = changes.of_rows(adapters_of_rows), y.clone()
                assert rows is not None
                add_changes(rows, 0, x, got)
                found.append(got[2])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("columns", "results", "dtype"),
    [(72, 64, torch.float32), (64, 72, torch.float32), (64, 64, torch.float16)],
)
def test_other_widths_and_types_are_not_taken(columns: int, results: int, dtype: torch.dtype) -> None:
    assert not takes(torch.zeros(1, columns, dtype=dtype), torch.zeros(1, results, dtype=dtype))


def _running(tmp_path: Path, **changes: object) -> Running:
    """Whose base has compiled steps."""
    running = Running(tmp_path, sizes=SIZES, **changes)  # type: ignore[arg-type]
    assert running.engine._models[ModelId("base")].compiled is not None
    return running


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("packs", first_of(1, [True, False]))
def test_logits_of_compiled_steps_are_peft_s(tmp_path: Path, model_type: str, packs: bool) -> None:
    peft = pytest.importorskip("peft")
    running = _running(tmp_path, model_type=model_type, packs=packs, targets=ALL, rank=6, std=0.05)
    names = [spec.model for spec in running.specs]
    found = running.run([names[0], None, names[1]], 6)
    for number, path in ((0, running.paths[0]), (1, None), (2, running.paths[1])):
        model = adapters.AutoModelForCausalLM.from_pretrained(running.checkpoint).eval()
        if path is not None:
            model = peft.PeftModel.from_pretrained(model, str(path)).merge_and_unload()
        assert far(found[number], expected(model, PROMPTS[number], 6)) < 1e-4


def test_of_an_adapter_of_some_layers_the_others_stay(tmp_path: Path) -> None:
    running = _running(tmp_path, count=1)
    path = adapters.write(tmp_path / "half", running.checkpoint, seed=3, targets=ALL)
    kept = {name: each for name, each in adapters.tensors_of(path).items() if ".layers.1.mlp." in name}
    adapters.replace_tensors(path, kept)
    half = running.adapter(path)
    running.attach(half)
    found = running.run([running.specs[0].model, half.model], 5)
    merged = adapters.merged(running.checkpoint, path)
    assert far(found[1], expected(merged, PROMPTS[1], 5)) < 1e-4


def _both(running: Running, wanted: Sequence[ModelId | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the same step in compiled code and through modules."""
    engine, rows = running.engine, []
    for number, adapter in enumerate(wanted):
        row = running.begun(RequestId(number), PROMPTS[number], adapter, 20)
        (sampled,) = engine.step(ModelId("base"), [row])
        assert sampled
        rows.append(StepRow(row.request, (7,), row.stop, row.blocks, adapter=adapter))
    attached = engine._models[ModelId("base")]
    assert attached.compiled is not None
    with torch.inference_mode():
        compiled = attached.compiled.decode(rows, engine._computing.scratch).float()
        order, logits = engine._decode_gathered(attached, rows)
    return compiled, logits[torch.tensor(order).argsort()].float()


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("dense", "float32"), ("dense", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16")],
)
@torch.inference_mode()
def test_logits_are_as_near_to_float32_s_as_the_modules_are(tmp_path: Path, weights: WeightsName, dtype: str) -> None:
    running = _running(tmp_path, weights=weights, dtype=dtype, packs=True, std=0.05, targets=ALL)
    names = [spec.model for spec in running.specs]
    ours, theirs = _both(running, [names[0], None, names[1]])
    exact = []
    for number, path in enumerate([running.paths[0], None, running.paths[1]]):
        model = adapters.AutoModelForCausalLM.from_pretrained(running.checkpoint, dtype=dtype_named(dtype)).eval()
        if weights != "dense":
            replace_weights(model, weights)
        if path is not None:
            adapters.merge_into(model.float(), path)
        exact.append(model.float()(input_ids=torch.tensor([[*PROMPTS[number], 7]])).logits[0, -1])
    off, modules_off = ((each - torch.stack(exact)).norm() / torch.stack(exact).norm() for each in (ours, theirs))
    assert off < 1.25 * modules_off + (1e-5 if (weights, dtype) == ("dense", "float32") else 1e-3)
    assert modules_off < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_row_has_what_it_has_beside_rows_without_adapter(tmp_path: Path, dtype: str) -> None:
    """To the bit, in steps of as many rows."""
    running = _running(tmp_path, count=3, dtype=dtype, packs=True)
    names: list[ModelId | None] = [spec.model for spec in running.specs]
    together = running.run([*names, None], 8)
    for number, adapter in enumerate([*names, None]):
        alone: list[ModelId | None] = [None] * 4
        alone[number] = adapter
        assert far(running.run(alone, 8)[number], together[number]) == 0.0


def test_an_adapter_that_left_changes_no_compiled_step(tmp_path: Path) -> None:
    running = _running(tmp_path)
    gone, stays = (spec.model for spec in running.specs)
    before = running.run([None, None], 3)
    running.engine.detach(gone)
    after = running.run([gone, stays], 3)
    assert far(after[0], before[0]) == 0.0 and far(after[1], before[1]) > 0.1
    running.attach(running.specs[0])
    assert far(running.run([gone, stays], 3)[0], before[0]) > 0.1
