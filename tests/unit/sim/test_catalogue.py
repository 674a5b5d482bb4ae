"""The models of a simulation."""

from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.sim.catalogue import catalogue, models
from aegis.sim.shapes import MIX, SHAPES

FILE = """
shapes:
  tiny: {layers: 2, heads: 4, kv_heads: 2, hidden: 256, intermediate: 512, vocab: 1000, tied: true}
models:
  chat: {shape: qwen2.5-7b}
  code: {shape: tiny, slo: {ttft_ms: 500}}
"""


def ids(*names: str) -> list[ModelId]:
    return [ModelId(name) for name in names]


def test_a_mix_repeats_every_ten() -> None:
    specs = models("mix:25")
    assert [spec.root for spec in specs] == [MIX[index % 10] for index in range(25)]
    assert [specs[0].model, specs[24].model] == ["m000", "m024"]


def test_parts_follow_each_other() -> None:
    assert [(spec.model, spec.root) for spec in models("qwen2.5-72b:1,yi-1.5-6b:2")] == [
        ("m000", "qwen2.5-72b"),
        ("m001", "yi-1.5-6b"),
        ("m002", "yi-1.5-6b"),
    ]


def test_without_a_count_there_are_as_many_as_the_workload_needs() -> None:
    assert [spec.model for spec in models("mix", asked=ids("m07", "m02"))] == [f"m{index:02}" for index in range(8)]
    assert [spec.model for spec in models("mix", asked=ids("writer", "coder", "writer"))] == ["coder", "writer"]


def test_a_workloads_own_way_to_number_is_kept() -> None:
    specs = models("mix:11", asked=ids("m8", "m10"))
    assert [(specs[index].model, specs[index].root) for index in (8, 10)] == [
        ("m8", "llama-2-13b"),
        ("m10", "qwen2.5-7b"),
    ]
    assert len({spec.model for spec in specs}) == 11


def test_numbers_that_are_not_unique_are_names() -> None:
    assert [spec.model for spec in models("mix", asked=ids("m1", "m01"))] == ["m01", "m1"]


def test_deadlines_are_the_markets_unless_a_model_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "market.yaml"
    file.write_text(FILE)
    chat, code = models(str(file), slo=Slo(ttft_ns=9, tbt_ns=7))
    assert (chat.model, chat.slo) == ("chat", Slo(ttft_ns=9, tbt_ns=7))
    assert (code.model, code.slo) == ("code", Slo(ttft_ns=500_000_000, tbt_ns=7))


def test_a_file_may_bring_a_shape(tmp_path: Path) -> None:
    file = tmp_path / "market.yaml"
    file.write_text(FILE)
    manifest = models(str(file))[1].manifest
    attention = 256 * (2 * 256 + 2 * 128)
    assert manifest.parameters == 2 * (attention + 3 * 256 * 512 + 2 * 256) + 1000 * 256 + 256
    assert manifest.kv.token_bytes == 2 * 2 * (2 * 64 + 2 * 64)


ADAPTED = """
weights: int8
models:
  chat: {shape: qwen2.5-7b, weights: int4}
  law: {base: chat, rank: 16}
  physics: {base: chat, size: 40MiB}
  code: {shape: qwen2.5-7b, lazy: true, slo: {ttft_ms: 500}}
"""


def test_a_file_says_how_weights_are_stored_and_what_shares_them(tmp_path: Path) -> None:
    file, shape = tmp_path / "market.yaml", SHAPES["qwen2.5-7b"]
    file.write_text(ADAPTED)
    found = catalogue(str(file), asked=ids("physics", "chat"))
    chat, code = found.specs
    assert found.adapters == {ModelId("law"): ModelId("chat"), ModelId("physics"): ModelId("chat")}
    beside = shape.adapter_bytes(16) + (40 << 20)
    assert chat.manifest.image_bytes == shape.image_bytes("int4") + beside < shape.image_bytes("int8")
    assert chat.manifest.quantised and chat.manifest.quantised.weights == "int4"
    assert code.manifest.image_bytes == shape.image_bytes("int8")
    assert found.fetched == {ModelId("code"): shape.weight_bytes}
    assert found.names() == set(ids("chat", "law", "physics", "code"))


def test_what_models_do_not_say_holds_for_all() -> None:
    found = catalogue("qwen2.5-7b:2", weights="int4", lazy=True)
    assert {spec.manifest.image_bytes for spec in found.specs} == {SHAPES["qwen2.5-7b"].image_bytes("int4")}
    assert found.fetched == dict.fromkeys(ids("m000", "m001"), SHAPES["qwen2.5-7b"].weight_bytes)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("base: chat, rank", "base: law, rank", "models.law.base: should be a model of the file with a shape"),
        ("rank: 16", "rank: 16, slo: {ttft_ms: 5}", "models.law: slo is its base's: set it there"),
        ("rank: 16", "rank: 16, size: 3MiB", "models.law: should have one of rank and size"),
        (", rank: 16", "", "models.law: should have one of rank and size"),
        ("base: chat, rank: 16", "rank: 16", "models.law: rank and size are of adapters, which name their base"),
        ("base: chat, rank: 16", "lazy: true", "models.law: should have a shape, or the base"),
        ("weights: int4", "weights: int3", "models.chat.weights: should be 'dense', 'int8', 'int4'"),
    ],
)
def test_an_adapter_is_of_a_model_and_has_a_size(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "market.yaml"
    file.write_text(ADAPTED.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        catalogue(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mix:", "'mix:' should be NAME:COUNT with a name of mix, yi-1.5-6b"),
        ("mix:0", "'mix:0' should be NAME:COUNT"),
        ("gpt-5:3", "'gpt-5:3' should be NAME:COUNT"),
        ("mix:3,", "'' should be NAME:COUNT"),
        ("mix,qwen2.5-7b:1", "'mix' should be NAME:COUNT"),
    ],
)
def test_what_is_no_list_of_models_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        models(text)


def test_a_workload_has_to_fit_its_models(tmp_path: Path) -> None:
    file = tmp_path / "market.yaml"
    file.write_text(FILE)
    with pytest.raises(UserError, match=r"mix:16: 16 models, but the workload asks for 24"):
        models("mix:16", asked=ids("m23"))
    with pytest.raises(UserError, match=r"mix:3: 3 models, but the workload names 2; leave out the count"):
        models("mix:3", asked=ids("a", "b"))
    with pytest.raises(UserError, match=r"has no model a, which the workload asks for"):
        models(str(file), asked=ids("chat", "b", "a"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shape: tiny", "shape: big", "models.code.shape: should be one of yi-1.5-6b, .*, tiny, not 'big'"),
        ("code:", "'no name!':", "models.no name!: is no model name"),
        ("layers: 2,", "", "shapes.tiny.layers: is missing"),
        ("layers: 2,", "layers: two,", "shapes.tiny.layers: should be a valid integer"),
        ("ttft_ms: 500", "ttft_ms: 0", "models.code.slo.ttft_ms: should be greater than or equal to 0.001"),
    ],
)
def test_a_wrong_file_is_refused_by_key(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "market.yaml"
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    with pytest.raises(UserError, match=message):
        models(str(file))


def test_the_example_of_the_docs_is_a_market(tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs/simulate.md"
    file = tmp_path / "market.yaml"
    file.write_text(docs.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0])
    assert [(spec.model, spec.root) for spec in models(str(file))] == [("chat", "qwen2.5-7b"), ("code", "mine")]
