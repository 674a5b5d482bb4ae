"""Models without files."""

import pytest

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.sim.shapes import MIX, SHAPES

# Parameters as the model cards' safetensors indexes count them.
PARAMETERS = {
    "yi-1.5-6b": 6_061_035_520,
    "qwen2.5-7b": 7_615_616_512,
    "yi-1.5-9b": 8_829_407_232,
    "llama-2-13b": 13_015_864_320,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert SHAPES[name].parameters == PARAMETERS[name]
    assert SHAPES[name].weight_bytes == 2 * PARAMETERS[name]


@pytest.mark.parametrize(("name", "mib"), [("qwen2.5-7b", 0.875), ("yi-1.5-9b", 1.5), ("llama-2-13b", 12.5)])
def test_blocks_of_16_tokens_are_as_large_as_aegaeons(name: str, mib: float) -> None:
    assert SHAPES[name].kv.block_bytes == mib * 2**20


def test_ten_models_of_the_mix_are_six_two_and_two() -> None:
    assert [MIX.count(name) for name in ("qwen2.5-7b", "yi-1.5-9b", "llama-2-13b")] == [6, 2, 2]


def test_two_models_of_a_shape_have_each_its_own_image() -> None:
    one, two = (SHAPES["qwen2.5-7b"].spec(ModelId(name), Slo()) for name in ("a", "b"))
    assert one.manifest.fingerprint != two.manifest.fingerprint
    assert one.manifest.kv == two.manifest.kv
    assert one.manifest.image_bytes == 15_231_233_024
    assert one.root == "qwen2.5-7b"
