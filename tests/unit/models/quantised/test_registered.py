"""A checkpoint of each format is the model of the weights that it stands for, and stays in as few bits where it can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from aegis.core.errors import ModelRefused
from aegis.core.model import WeightsName
from aegis.engine.quantised import layers
from aegis.models.checkpoint import open_checkpoint
from aegis.models.loading import load
from tests import quantised_checkpoints as made
from tests.long_forms import first_rows_of
from tests.unit.models.quantised.served import answers_as, nothing_registered, registered

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


class Form(NamedTuple):
    model_type: str
    settings: dict[str, Any]
    pack: made.Pack
    note: str
    changes: tuple[tuple[str, Any], ...] = ()


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return made.compressed_config(form, weights)


FORMS: dict[str, Form] = {
    "gptq": Form("llama", GPTQ, made.gptq(), "GPTQ int4 of groups of 128, runs as int4"),
    "gptq v2, asymmetric": Form(
        "qwen2",
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False, "group_size": 32},
        made.gptq(group=32, less=0, symmetric=False),
        "GPTQ int4 of groups of 32, runs as int4",
    ),
    "gptq, rows": Form(
        "llama",
        GPTQ | {"group_size": -1, "sym": False},
        made.gptq(group=-1, symmetric=False),
        "GPTQ int4 of rows, runs as int4",
    ),
    "gptq, small groups": Form(
        "llama", GPTQ | {"group_size": 16}, made.gptq(group=16), "GPTQ int4 of groups of 16, runs as float32"
    ),
    "gptq, order of activations": Form(
        "qwen2",
        GPTQ | {"desc_act": True, "sym": False, "group_size": 64},
        made.gptq(shuffled=True, symmetric=False, group=64),
        "GPTQ int4 of groups of 64 in the order of activations, runs as float32",
    ),
    "gptq 8": Form("llama", GPTQ | {"bits": 8}, made.gptq(bits=8), "GPTQ int8 of groups of 128, runs as int8"),
    "gptq 8, rows": Form(
        "qwen2", GPTQ | {"bits": 8, "group_size": -1}, made.gptq(8, -1), "GPTQ int8 of rows, runs as int8"
    ),
    "gptq 8, asymmetric": Form(
        "llama",
        GPTQ | {"bits": 8, "sym": False},
        made.gptq(bits=8, symmetric=False),
        "GPTQ int8 of groups of 128, runs as float32",
    ),
    "gptq 3": Form("llama", GPTQ | {"bits": 3}, made.gptq(bits=3), "GPTQ int3 of groups of 128, runs as int4"),
    "gptq 2": Form("qwen2", GPTQ | {"bits": 2}, made.gptq(bits=2), "GPTQ int2 of groups of 128, runs as int4"),
    "gptq, experts": Form(
        "qwen3_moe",
        GPTQ | {"group_size": 32},
        made.gptq(group=32),
        "GPTQ int4 of groups of 32, runs as int4",
        (("moe_intermediate_size", 96),),
    ),
    "awq": Form("llama", AWQ, made.awq(), "AWQ int4 of groups of 128, runs as int4"),
    "awq 64": Form("qwen2", AWQ | {"group_size": 64}, made.awq(64), "AWQ int4 of groups of 64, runs as int4"),
    "packed": Form(
        "llama",
        compressed("pack-quantized", num_bits=4, group_size=128),
        made.packed(),
        "compressed-tensors int4 of groups of 128, runs as int4",
    ),
    "packed, asymmetric": Form(
        "qwen2",
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
        made.packed(group=32, symmetric=False),
        "compressed-tensors int4 of groups of 32, runs as int4",
    ),
    "packed 8": Form(
        "llama",
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        made.packed(8, -1),
        "compressed-tensors int8 of rows, runs as int8",
    ),
    "int8": Form(
        "qwen2",
        compressed("int-quantized", num_bits=8, strategy="channel"),
        made.int8(),
        "compressed-tensors int8 of rows, runs as int8",
    ),
    "int8, naive, asymmetric": Form(
        "llama",
        compressed("naive-quantized", num_bits=8, symmetric=False),
        made.int8(symmetric=False),
        "compressed-tensors int8 of rows, runs as float32",
    ),
    "float8": Form(
        "llama",
        compressed("float-quantized", num_bits=8, type="float"),
        made.fp8(None, "weight_scale"),
        "compressed-tensors FP8, runs as float32",
    ),
    "fp8": Form("llama", {"quant_method": "fp8", "weight_block_size": [128, 128]}, made.fp8(), "FP8, runs as float32"),
    "fp8, small blocks": Form(
        "qwen2",
        {"quant_method": "fp8", "weight_block_size": [48, 80], "fmt": "e4m3"},
        made.fp8((48, 80)),
        "FP8, runs as float32",
    ),
}


IN_ROWS = ("gptq v2, asymmetric", "gptq 8", "gptq 8, rows")
"""Those that are tried as other devices have them, too."""


@pytest.mark.parametrize(
    ("name", "packs"), first_rows_of(6, [*((name, True) for name in FORMS), *((name, False) for name in IN_ROWS)])
)
def test_it_answers_as_the_model_of_its_weights(name: str, packs: bool, tmp_path: Path) -> None:
    form = FORMS[name]
    reference = made.write(tmp_path / "m", form.model_type, form.settings, form.pack, **dict(form.changes))
    weights = reference.state_dict()
    loaded = load(open_checkpoint(tmp_path / "m"), "float32", keeps=True).model.state_dict()
    assert loaded.keys() == weights.keys()
    assert [name for name, weight in loaded.items() if not torch.equal(weight, weights[name])] == []
    spec = registered(tmp_path / "m", packs=packs)
    assert spec.note == form.note
    leaves = {name.rpartition(".")[2] for entry in spec.manifest.tensors for name in entry.names}
    kept = {leaf.partition("_")[0] for leaf in leaves & layers.FORMS.keys()}
    assert kept == {word for word in form.note.partition("runs as ")[2].split(" and ") if word.startswith("int")}
    assert "quantization_config" not in json.loads((Path(spec.directory) / "config.json").read_text())
    answers_as(spec, reference)


def test_layers_of_other_bits_are_read_where_the_configuration_says_so(tmp_path: Path) -> None:
    """gptqmodel's `dynamic` has other bits for some; which ones is seen from their tensors."""
    packs = iter([made.gptq(bits=8), *[made.gptq()] * 13])
    settings = GPTQ | {"dynamic": {r"+:.*\.0\.self_attn\.q_proj": {"bits": 8}}}
    reference = made.write(tmp_path / "m", "llama", settings, lambda weight: next(packs)(weight))
    spec = registered(tmp_path / "m", packs=True)
    assert spec.note == "GPTQ int4 of groups of 128, runs as int4 and int8"
    answers_as(spec, reference)


def test_ranks_share_out_the_numbers(tmp_path: Path) -> None:
    made.write(tmp_path / "m", "llama", GPTQ | {"group_size": 32}, made.gptq(group=32))
    spec = registered(tmp_path / "m", ranks=2)
    assert spec.note == "GPTQ int4 of groups of 32, runs as float32"


@pytest.mark.parametrize(
    ("settings", "pack", "weights", "kept", "anew"),
    [
        (GPTQ, made.gptq(), "int8", 14, 1),  # the last layer is dense
        (GPTQ | {"bits": 8, "group_size": -1}, made.gptq(8, -1), "int8", 14, 1),
        (GPTQ | {"bits": 8}, made.gptq(8), "int8", 12, 3),
        (GPTQ | {"bits": 8}, made.gptq(8), "int4", 0, 15),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, made.fp8(), "int8", 0, 15),
    ],
    ids=["of fewer bits", "of as many", "of groups", "of more bits", "floats"],
)
def test_what_comes_in_more_bits_is_quantised_if_that_is_asked_for(
    settings: dict[str, Any], pack: made.Pack, weights: WeightsName, kept: int, anew: int, tmp_path: Path
) -> None:
    made.write(tmp_path / "m", "llama", settings, pack)
    spec = registered(tmp_path / "m", weights=weights)
    assert spec.manifest.quantised and spec.manifest.quantised.layers == anew
    assert "runs as" not in spec.note, "what it runs as is told with what that costs"
    forms = [name for entry in spec.manifest.tensors for name in entry.names if name.rpartition(".")[2] in layers.FORMS]
    assert len(forms) == kept + anew


def test_scales_that_the_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    def large(weight: torch.Tensor) -> made.Layer:
        layer = made.packed(group=32)(weight)
        layer.tensors["weight_scale"] = layer.tensors["weight_scale"].float() * 1e9
        return layer

    made.write(tmp_path / "m", "llama", compressed("pack-quantized", num_bits=4, group_size=32), large)
    with pytest.raises(ModelRefused, match=r"mlp.down_proj: its scales are too large for float16"):
        registered(tmp_path / "m", "auto")
    assert nothing_registered(tmp_path / "m")
