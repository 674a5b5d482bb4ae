"""A dense checkpoint quantised when it is registered: what is stored, what is told, what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec, WeightsName
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models import quantising, registry
from aegis.models.self_check import check
from aegis.models.sources import Source
from tests import checkpoints
from tests.long_forms import first_of
from tests.registering import register


def registered(
    tmp_path: Path,
    weights: WeightsName,
    *,
    model_type: str = "llama",
    dtype: str = "float32",
    own: WeightsName | None = None,
    packs: bool = True,
) -> ModelSpec:
    path = tmp_path / model_type
    if not path.exists():
        checkpoints.write(path, model_type, dtype=torch.float32)
    checks = partial(check, make_engine=TransformersEngine)
    source = Source(ModelId("m"), path=str(path), weights=own)
    return register(source, dtype=dtype, cache_dir=tmp_path / "c", check=checks, packs=packs, weights=weights)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype", first_of(1, ["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g64", "int4-g32"])
def test_what_is_stored_passes_the_check_and_is_told(
    tmp_path: Path, weights: WeightsName, dtype: str, packs: bool
) -> None:
    spec = registered(tmp_path, weights, dtype=dtype, packs=packs)
    quantised = spec.manifest.quantised
    assert quantised and quantised.weights == weights and quantised.layers == 15
    assert 0.8 < quantised.perplexity_ratio < 1.25
    assert 0 < quantised.logit_difference < (0.05 if weights == "int8" else 0.4)
    assert quantised.told.startswith(f"{weights}, perplexity x ")


@pytest.mark.parametrize("model_type", first_of(2, ["gemma2", "mistral", "qwen2", "phi3", "qwen3_moe", "deepseek_v2"]))
def test_architectures_pass_the_check(tmp_path: Path, model_type: str) -> None:
    for weights in ("int8", "int4"):
        spec = registered(tmp_path, weights, model_type=model_type)  # type: ignore[arg-type]
        assert spec.manifest.quantised and spec.manifest.quantised.layers > 4


def test_bytes_shrink_as_schedulers_see_them(tmp_path: Path) -> None:
    names: tuple[WeightsName, ...] = ("dense", "int8", "int4")
    sizes = [registered(tmp_path, name).without_tensors().manifest.image_bytes for name in names]
    assert sizes[0] > sizes[1] > sizes[2]
    files = [Path(registered(tmp_path, name).image_path).stat().st_size for name in names]
    assert files == sizes


def test_images_do_not_collide(tmp_path: Path) -> None:
    names: tuple[WeightsName, ...] = ("dense", "int8", "int4", "int4-g64", "int4-g32")
    found = {(registered(tmp_path, name, packs=packs).directory) for name in names for packs in (True, False)}
    assert len(found) == 9  # dense float32 is the same for all processors
    again = {(registered(tmp_path, name, packs=packs).directory) for name in names for packs in (True, False)}
    assert again == found


def test_a_model_s_own_choice_comes_first(tmp_path: Path) -> None:
    assert registered(tmp_path, "int8", own="dense").manifest.quantised is None
    assert registered(tmp_path, "dense", own="int4").manifest.quantised is not None


def test_tied_embeddings_and_norms_stay(tmp_path: Path) -> None:
    manifest = registered(tmp_path, "int4", model_type="gemma2").manifest
    assert manifest.quantised and manifest.quantised.layers == 2 * 7, "the last layer is the embedding"
    tensors = manifest.tensors
    kept = {name for entry in tensors for name in entry.names if entry.dtype == "float32" and "scales" not in name}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= kept
    assert not any("proj.weight" in name for name in kept)


def test_what_quantising_spoils_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "PERPLEXITY_RATIO_MAX", 0.5)
    with pytest.raises(ModelRefused, match=r"as int4 its perplexity is \d\.\d\d times .* serve it as int4-g32 or int8"):
        registered(tmp_path, "int4")
    assert not [entry for entry in (tmp_path / "c" / "images").iterdir() if entry.is_dir()]


def test_a_checkpoint_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no layer of it can be quantised: serve it without --weights int8"):
        registered(tmp_path, "int8", model_type="gpt2")


def test_engines_and_ranks_that_cannot_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_refuse_for_vllm", lambda _terms, _checkpoint: None)
    source = Source(ModelId("m"), path=str(checkpoints.write(tmp_path / "m", "llama")))
    with pytest.raises(ModelRefused, match="the vllm engine runs no weights that were made int8 here"):
        register(source, dtype="auto", cache_dir=tmp_path, engine="vllm", weights="int8")
    with pytest.raises(ModelRefused, match="cannot be shared out among ranks yet"):
        register(source, dtype="auto", cache_dir=tmp_path, ranks=2, weights="int8")


def test_the_passage_is_the_one_that_the_model_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering tells its cost before the image is written."""
    said: list[str] = []
    path = checkpoints.write(tmp_path / "m", "llama")
    source = Source(ModelId("m"), path=str(path), weights="int8")
    register(source, dtype="auto", cache_dir=tmp_path / "c", report=lambda text, _: said.append(text))
    assert "making its weights int8" in said
    at = next(i for i, text in enumerate(said) if text.startswith("int8, perplexity x "))
    assert said[at + 1] == "writing the weight image"
