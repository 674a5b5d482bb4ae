"""Adapters that are registered: found by their base, laid out beside it, or refused in a line that says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ModelId
from aegis.core.model import TENSOR_ALIGNMENT_BYTES, Manifest, ModelSpec
from aegis.device.image_directory import TOKENIZER
from aegis.models.adapters import image
from aegis.models.adapters.configuration import base_of, is_adapter
from aegis.models.disk_cache import evict
from aegis.models.sources import Source, read_sources
from aegis.models.text.text_model import TextModel
from tests import adapters, checkpoints
from tests.registering import register

Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = checkpoints.write(tmp_path_factory.mktemp("served") / "base", "llama", tokenizer=True)
    spec = register(Source(ModelId("base"), path=str(path)), dtype="float32", cache_dir=path.parent / "cache")
    assert spec
    return spec


def registered(path: Path, base: ModelSpec) -> ModelSpec:
    source = Source(ModelId(path.name), path=str(path), adapter=True)
    spec = register(source, dtype="auto", cache_dir=path.parent / "cache", base=base)
    assert spec
    return spec


def test_its_tensors_are_aligned_and_the_rest_is_its_base_s(tmp_path: Path, base: ModelSpec) -> None:
    spec = registered(adapters.write(tmp_path / "a", Path(base.root), rank=4, alpha=6), base)
    manifest = spec.manifest
    assert spec.base == "base" and manifest.adapter and (manifest.adapter.rank, manifest.adapter.scale) == (4, 1.5)
    assert (manifest.kv, manifest.vocab_size) == (base.manifest.kv, base.manifest.vocab_size)
    assert len(manifest.tensors) == 2 * 2 * len(adapters.TARGETS)
    assert all(entry.offset % TENSOR_ALIGNMENT_BYTES == 0 for entry in manifest.tensors)
    assert Path(spec.image_path).stat().st_size == manifest.image_bytes < base.manifest.image_bytes / 4
    text = TextModel.load(Path(spec.directory))
    assert text and text.encode("the cat")
    again = registered(tmp_path / "a", base)
    assert again == spec


def test_an_image_whose_text_cannot_be_read_is_made_again(tmp_path: Path, base: ModelSpec) -> None:
    spec = registered(adapters.write(tmp_path / "a", Path(base.root)), base)
    file = Path(spec.directory) / TOKENIZER
    whole = file.read_bytes()
    file.unlink()
    assert registered(tmp_path / "a", base) == spec and file.read_bytes() == whole


def test_another_image_of_the_base_needs_another_one(tmp_path: Path, base: ModelSpec) -> None:
    path = adapters.write(tmp_path / "a", Path(base.root))
    other = replace(base, manifest=replace(base.manifest, fingerprint="other"))
    assert registered(path, base).directory != registered(path, other).directory


def configured(**changes: object) -> Edit:
    def edit(path: Path) -> None:
        file = path / adapters.CONFIGURATION
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def renamed(old: str, new: str) -> Edit:
    def edit(path: Path) -> None:
        tensors = adapters.tensors_of(path)
        adapters.replace_tensors(path, {name.replace(old, new): tensor for name, tensor in tensors.items()})

    return edit


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(path: Path) -> None:
        tensors = adapters.tensors_of(path)
        key = next(key for key in tensors if name in key)
        adapters.replace_tensors(path, tensors | {key: change(tensors[key])})

    return edit


def without(name: str) -> Edit:
    def edit(path: Path) -> None:
        tensors = adapters.tensors_of(path)
        adapters.replace_tensors(path, {key: tensor for key, tensor in tensors.items() if name not in key})

    return edit


def cut(path: Path) -> None:
    file = path / adapters.WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def endless_header(path: Path) -> None:
    (path / adapters.WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def no_json(path: Path) -> None:
    (path / adapters.CONFIGURATION).write_text("{")


def pickled(path: Path) -> None:
    (path / adapters.WEIGHTS).rename(path / "adapter_model.bin")


BAD: dict[str, tuple[Edit, str]] = {
    "dora": (configured(use_dora=True), "it is a DoRA adapter"),
    "modules of its own": (configured(modules_to_save=["lm_head"]), "modules of its own"),
    "tokens of its own": (configured(trainable_token_indices=[5]), "tokens of its own"),
    "biases": (configured(bias="all"), "it has biases"),
    "ranks": (configured(rank_pattern={"q_proj": 2}), "different ranks"),
    "scales": (configured(alpha_pattern={"q_proj": 2}), "different scales"),
    "another kind": (configured(peft_type="IA3"), "an adapter of type 'IA3'; only LORA is served"),
    "another task": (configured(task_type="SEQ_CLS"), "its task_type is 'SEQ_CLS'"),
    "a changed base": (configured(init_lora_weights="pissa_niter_4"), "begun from changed weights"),
    "a base changed along gradients": (configured(init_lora_weights="lora_ga"), "begun from changed weights"),
    "no rank": (configured(r=0), "r is 0; expected 1 to 512"),
    "a rank that is too large": (configured(r=1 << 40), "expected 1 to 512"),
    "no scale": (configured(lora_alpha="x"), "lora_alpha is 'x'"),
    "an infinite scale": (configured(lora_alpha=float("inf")), "lora_alpha is inf"),
    "a scale beyond all floats": (configured(lora_alpha=10**400), "lora_alpha is 1000.*; expected a number up to"),
    "another rank": (configured(r=8), "with rank 8 its base needs"),
    "unknown layers": (
        renamed("q_proj", "query"),
        r"it changes model\.layers\.0\.self_attn\.query, and its base has no",
    ),
    "the last layer": (
        renamed("model.layers.0.self_attn.q_proj", "lm_head"),
        "it changes lm_head, and its base has no",
    ),
    "its own embeddings": (renamed("self_attn.q_proj.lora_A", "embed_tokens"), "is no part of a LoRA pair"),
    "dora's magnitudes": (renamed("lora_B.weight", "lora_magnitude_vector"), "is no part of a LoRA pair"),
    "another base's shape": (changed("q_proj.lora_A", lambda a: a[:, :-1]), "it belongs to another base"),
    "two of one": (
        renamed("layers.1.self_attn.q_proj.lora_A.weight", "layers.0.self_attn.q_proj.lora_A.default.weight"),
        "there are two of A",
    ),
    "half a pair": (without("layers.1.self_attn.v_proj.lora_B"), "there is one of A and B only"),
    "no tensors": (without(""), "it holds no tensors"),
    "no numbers": (changed("q_proj.lora_B", lambda b: b * float("nan")), "has values that are no numbers"),
    "integers": (changed("q_proj.lora_B", lambda b: b.to(torch.int8)), "is I8; only BF16, F16, F32 are read"),
    "a file that was cut": (cut, "truncated or not a safetensors file"),
    "a header without end": (endless_header, "truncated or not a safetensors file"),
    "pickles": (pickled, "its weights are pickled"),
    "no JSON": (no_json, "not readable as JSON"),
}


@pytest.mark.parametrize(("edit", "reason"), BAD.values(), ids=list(BAD))
def test_what_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, base: ModelSpec, edit: Edit, reason: str
) -> None:
    path = adapters.write(tmp_path / "a", Path(base.root))
    edit(path)
    with pytest.raises(ModelRefused, match=reason) as refusal:
        registered(path, base)
    assert str(path) in refusal.value.message and "\n" not in refusal.value.message
    images = tmp_path / "cache" / "images"
    assert not images.exists() or not [entry for entry in images.iterdir() if entry.is_dir()]


def test_a_base_that_has_left_the_disk_is_asked_for_and_one_that_is_read_stays(
    tmp_path: Path, base: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(base.directory, tmp_path / "cache" / "images" / "base")
    moved = replace(base, directory=str(own))
    path = adapters.write(tmp_path / "a", Path(base.root))
    read, left = image.read_pairs, list[bool]()

    def leaving(file: Path, shapes: image.Shapes, rank: int, dtype: str) -> image.Pairs:
        left.append(evict(own))
        return read(file, shapes, rank, dtype)

    monkeypatch.setattr(image, "read_pairs", leaving)
    spec = registered(path, moved)
    assert left == [False] and own.exists()
    assert evict(own)
    assert registered(path, moved) == spec, "its own image is there"
    assert evict(Path(spec.directory))
    with pytest.raises(
        ModelRefused, match="the image of its base 'base', beside which it is made, has left the disk: ev"
    ):
        registered(path, moved)


def test_values_that_the_type_of_the_base_cannot_hold_are_refused(tmp_path: Path) -> None:
    source = Source(ModelId("base"), path=str(checkpoints.write(tmp_path / "base", "llama")))
    base = register(source, dtype="float16", cache_dir=tmp_path / "cache")
    assert base
    path = adapters.write(tmp_path / "a", Path(base.root))
    changed("q_proj.lora_B", lambda b: b * 1e6)(path)
    with pytest.raises(ModelRefused, match="values that are too large for float16, in which its base runs"):
        registered(path, base)


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [({"engine": "vllm"}, "adapters need transformers"), ({"ranks": 2}, "shared out among ranks")],
)
def test_bases_that_take_none_are_named(
    tmp_path: Path, base: ModelSpec, manifest: dict[str, object], reason: str
) -> None:
    other: Manifest = replace(base.manifest, **manifest)
    with pytest.raises(ModelRefused, match=reason):
        registered(adapters.write(tmp_path / "a", Path(base.root)), replace(base, manifest=other))


def test_a_base_is_found_by_name_or_source(base: ModelSpec) -> None:
    models = {base.model: base, ModelId("same"): replace(base, model=ModelId("same"))}
    assert base_of(None, base.root, models).model == "base"
    assert base_of(None, "same", models).model == "same"
    assert base_of("same", base.root, models).model == "same"
    assert base_of("same", "org/never-heard-of", models).model == "same"
    with pytest.raises(ModelRefused, match="its base is 'org/other', and no model here has that name or source"):
        base_of(None, "org/other", models)
    with pytest.raises(ModelRefused, match="names no base"):
        base_of(None, "", models)
    with pytest.raises(ModelRefused, match="there is no model named 'x'"):
        base_of("x", base.root, models)
    models[ModelId("other")] = replace(base, model=ModelId("other"), root="/elsewhere")
    with pytest.raises(ModelRefused, match=r"it is an adapter of '.*', which is served as 'base', not of 'other'"):
        base_of("other", base.root, models)
    adapter = replace(base, model=ModelId("a"), base=base.model)
    with pytest.raises(ModelRefused, match="there is no model named 'a' that could be its base"):
        base_of("a", "", models | {adapter.model: adapter})


def test_sources_know_adapters(tmp_path: Path, base: ModelSpec) -> None:
    adapters.write(tmp_path / "models" / "a", Path(base.root))
    assert is_adapter(tmp_path / "models" / "a")
    (source,) = read_sources([str(tmp_path / "models")])
    assert (source.model, source.adapter, source.base) == ("a", True, None)
    listed = tmp_path / "models.yaml"
    listed.write_text("models:\n  b:\n    path: models/a\n    base: base\n")
    (source,) = read_sources([str(listed)])
    assert (source.model, source.adapter, source.base) == ("b", True, "base")


@pytest.mark.parametrize("term", ["dtype: float32", "weights: int8", "engine: vllm", "lazy: true", "slo: {ttft_ms: 5}"])
def test_an_adapter_has_the_terms_of_its_base(tmp_path: Path, base: ModelSpec, term: str) -> None:
    adapters.write(tmp_path / "a", Path(base.root))
    listed = tmp_path / "models.yaml"
    listed.write_text(f"models:\n  a:\n    path: a\n    {term}\n")
    with pytest.raises(UserError, match=f"an adapter has no '{term.partition(':')[0]}' of its own"):
        read_sources([str(listed)])
