"""GPUs, built in and from files."""

from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.sim.catalogue import models
from aegis.sim.gpu_costs import GPUS, gpu
from aegis.sim.shapes import SHAPES
from aegis.sim.step_costs import StepCosts

FILE = """
memory: 40GiB
link_in: 20GB
host_bus: 100GB
gpus_per_node: 2
memory_bandwidth: 864GB
tflops: 181
switch_ms: 5
costs:
  qwen2.5-7b:
    decode_ms: {step: 20.5, ktoken: 0.1, row: 0.2, batch: 0.7}
    prefill_ms: {step: 3, ktoken: 90}
"""


def test_a_built_in_gpu_knows_what_was_measured_on_it() -> None:
    (seven,) = models("qwen2.5-7b:1")
    assert gpu("h800") is GPUS["h800"]
    assert gpu("h800").costs(seven) == StepCosts.of_ms(decode=(8.45, 0.06, 0.099), prefill=(0, 22.7, 0))
    assert gpu("h100").costs(seven) == gpu("h100").roofline(seven)


def test_packed_weights_and_adapters_are_read_and_nothing_else_of_a_step_changes() -> None:
    shape, card = SHAPES["qwen2.5-7b"], gpu("h800")
    dense = card.costs(shape.spec(ModelId("m"), Slo()))
    small = shape.spec(ModelId("m"), Slo(), weights="int8")
    saved_ns = 1e9 * (shape.weight_bytes - small.manifest.image_bytes) / card.memory_bytes_per_s
    assert card.costs(small).decode_ns(900, 7) == pytest.approx(dense.decode_ns(900, 7) - saved_ns, abs=2)
    assert card.roofline(small).decode_ns(900, 7) == pytest.approx(
        card.roofline(shape.spec(ModelId("m"), Slo())).decode_ns(900, 7) - saved_ns, abs=2
    )
    adapted = shape.spec(ModelId("m"), Slo(), beside_bytes=3_350_000_000)
    assert card.costs(adapted).decode_ns(900, 7) == dense.decode_ns(900, 7) + 1_000_000
    assert card.costs(small).prefill_ns(4000) == dense.prefill_ns(4000)
    assert card.costs(shape.spec(ModelId("m"), Slo(), weights="int4")).decode_ps >= 28 * card.layer_ns * 1_000


@pytest.mark.parametrize("name", ["qwen2.5-7b", "yi-1.5-9b", "llama-2-13b"])
def test_the_roofline_is_near_what_was_measured(name: str) -> None:
    (spec,) = models(f"{name}:1")
    measured, bound = gpu("h800").costs(spec), gpu("h800").roofline(spec)
    assert bound.decode_ns(1_000, 1) == pytest.approx(measured.decode_ns(1_000, 1), rel=0.06)
    assert bound.prefill_ns(1_000) == pytest.approx(measured.prefill_ns(1_000), rel=0.08)


def test_a_model_measured_under_its_own_name_comes_before_its_shape(tmp_path: Path) -> None:
    own = FILE.replace("  qwen2.5-7b:", "  m001: {decode_ms: {step: 7}}\n  qwen2.5-7b:")
    (tmp_path / "mine.yaml").write_text(own)
    first, second = models("qwen2.5-7b:2")
    card = gpu(str(tmp_path / "mine.yaml"))
    assert card.costs(first).decode_ns(0, 0) == 20_500_000
    assert card.costs(second).decode_ns(0, 0) == 7_000_000


def test_a_group_of_gpus_works_as_one() -> None:
    (large,) = models("qwen2.5-72b:1")
    one, four = gpu("h800"), gpu("h800x4")
    assert (four.name, four.gpus_per_node) == ("h800x4", 2)
    assert one.memory_bytes < large.manifest.image_bytes < four.memory_bytes
    assert four.in_bytes_per_s == 4 * one.in_bytes_per_s
    assert four.host_bytes_per_s == one.host_bytes_per_s
    assert one.costs(large).decode_ns(0, 1) / 4 < four.costs(large).decode_ns(0, 1) < one.costs(large).decode_ns(0, 1)


def test_eight_a100_take_what_muxwise_measured() -> None:
    """MuxWise Figure 6 a: steps of a token budget, 32 rows of decode with 1 K tokens each among it."""
    (large,) = models("llama-3-70b:1")
    costs = gpu("a100x8").costs(large)
    decode_ns = costs.decode_ns(32 * 1024, 32)
    steps_ms = [costs.step_ns([(0, budget - 32)], 32 * 1024, 32) / 1e6 for budget in (256, 512, 4096)]
    assert steps_ms[0] < 100 < steps_ms[1] and steps_ms[2] == pytest.approx(505, rel=0.02)
    assert 25 < decode_ns / 1e6 < 30.2


def test_a_decode_step_reads_for_a_part_of_its_time() -> None:
    (seven,) = models("qwen2.5-7b:1")
    card = gpu("h800")
    assert card.reading_share(seven, 0, 1) == pytest.approx(15.23e9 / 3.35e12 * 1e3 / 8.549, rel=0.01)
    assert 0.3 < card.reading_share(seven, 64 * 8192, 64) < card.reading_share(seven, 0, 1)


def test_a_file_says_what_lanes_may_have(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(FILE + "lanes: {units: 142, step: 16, prefill_traffic: 0.25}\n")
    shares = gpu(str(file)).shares
    assert shares is not None and (shares.units, shares.step_units, shares.prefill_traffic) == (142, 16, 0.25)
    file.write_text(FILE)
    assert gpu(str(file)).shares is None
    file.write_text(FILE + "lanes: {units: 0}\n")
    with pytest.raises(UserError, match=r"lanes.units"):
        gpu(str(file))


def test_a_file_describes_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "l40s.yaml"
    file.write_text(FILE)
    card = gpu(str(file))
    assert (card.name, card.memory_bytes, card.gpus_per_node) == ("l40s", 40 * 2**30, 2)
    assert (card.in_bytes_per_s, card.out_bytes_per_s) == (20 * 10**9, 20 * 10**9)
    assert (card.switch_ns, card.flops_per_s) == (5_000_000, 181 * 10**12)
    assert card.fits["qwen2.5-7b"].prefill_ns(1_000) == 93_000_000


def test_the_example_is_a_gpu() -> None:
    card = gpu(str(Path(__file__).parents[3] / "configs" / "gpus" / "l40s.yaml"))
    (seven,) = models("qwen2.5-7b:1")
    assert (card.name, card.fits) == ("l40s", {})
    assert (
        gpu("h800").costs(seven).decode_ns(0, 1)
        < card.costs(seven).decode_ns(0, 1)
        < gpu("a10").costs(seven).decode_ns(0, 1)
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory: 40GiB", "", "memory: is missing"),
        ("20GB", "20 gigs", "link_in: '20 gigs' is no size; write it like 512MiB, 4GiB or 1.5GB"),
        ("tflops: 181", "tflops: 0", "tflops: should be greater than 0, not 0"),
        ("switch_ms", "swich_ms", "swich_ms: unknown key; known are name, memory,"),
        ("row: 0.2", "rows: 0.2", "costs.qwen2.5-7b.decode_ms.rows: unknown key"),
        (
            "ktoken: 0.1",
            "ktoken: -1",
            "costs.qwen2.5-7b.decode_ms.ktoken: should be greater than or equal to 0, not -1",
        ),
        ("ktoken: 0.1", "ktoken: .nan", "costs.qwen2.5-7b.decode_ms.ktoken: should be a finite number, not nan"),
        ("{step: 3, ktoken: 90}", "3", "costs.qwen2.5-7b.prefill_ms: should be a mapping"),
        ("gpus_per_node: 2", "gpus_per_node: true", "gpus_per_node: should be a number, not true"),
    ],
)
def test_a_wrong_file_is_refused_by_key(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    with pytest.raises(UserError) as refused:
        gpu(str(file))
    assert refused.value.message.startswith(f"{file}: {message}")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("text", ["v100", "", "h100x", "h100x0", "h800x3", "h100x16", "../h100", "H100"])
def test_an_unknown_gpu_is_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(UserError, match=r"should be h100, h800, h20, a10"):
        gpu(text)


def test_a_group_larger_than_a_node_is_refused() -> None:
    with pytest.raises(UserError, match=r"a10x8: a node has 4"):
        gpu("a10x8")
