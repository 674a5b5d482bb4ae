"""Models shared out among ranks: each registers only if the ranks together say what transformers says."""

from functools import partial
from pathlib import Path

import pytest
import torch

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.engine.parallel.group import ThreadGroup
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models.self_check import check
from aegis.models.sources import Source
from tests import checkpoints
from tests.registering import register


def shared_out(tmp_path: Path, model_type: str, ranks: int, dtype: str = "float32", **changes: object) -> ModelSpec:
    path = tmp_path / model_type
    if not path.exists():
        checkpoints.write(path, model_type, **changes)
    source = Source(ModelId(model_type), path=str(path))
    return register(
        source,
        dtype=dtype,
        cache_dir=tmp_path / "cache",
        check=partial(check, make_engine=TransformersEngine),
        ranks=ranks,
    )


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "qwen3", "olmo2", "starcoder2", "glm4", "mixtral"])
def test_two_ranks_say_what_transformers_says(tmp_path: Path, model_type: str) -> None:
    spec = shared_out(tmp_path, model_type, 2)
    assert spec.manifest.ranks == 2


def test_each_rank_has_half_of_the_weights_and_of_the_kv(tmp_path: Path) -> None:
    whole, shared = (shared_out(tmp_path, "llama", ranks).manifest for ranks in (1, 2))
    assert shared.fingerprint != whole.fingerprint
    assert shared.kv.token_bytes * 2 == whole.kv.token_bytes
    assert shared.image_bytes < 0.55 * whole.image_bytes
    assert shared.parameters == whole.parameters


def test_four_ranks_in_bfloat16(tmp_path: Path) -> None:
    assert shared_out(tmp_path, "llama", 4, "bfloat16", num_key_value_heads=4).manifest.kv.layers[0].heads == 1


@pytest.mark.parametrize("tie", [False, True])
def test_a_vocabulary_that_leaves_one_over_is_on_every_rank(tmp_path: Path, tie: bool) -> None:
    spec = shared_out(tmp_path, "llama", 2, vocab_size=321, tie_word_embeddings=tie)
    (embedding,) = [entry for entry in spec.manifest.tensors if "model.embed_tokens.weight" in entry.names]
    assert embedding.shape[0] == 321
    assert len(embedding.names) == 1 + tie


def test_where_attention_is_gathered_every_rank_has_all_kv(tmp_path: Path) -> None:
    whole, shared = (shared_out(tmp_path, "phi3", ranks).manifest for ranks in (1, 2))
    assert shared.kv == whole.kv


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt2", {}, "has no plan"),
        ("llama", {"num_key_value_heads": 1}, "has 1 head of KV in a layer, which 2 ranks cannot share"),
        ("llama", {"intermediate_size": 97}, "2 ranks cannot share the 97 rows of model.layers.0.mlp"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        shared_out(tmp_path, model_type, 2, **changes)


def test_vllm_is_refused(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "llama", "llama")
    source = Source(ModelId("llama"), path=str(path))
    with pytest.raises(ModelRefused, match="the vLLM engine cannot share a model out"):
        register(source, dtype="float32", cache_dir=tmp_path / "cache", engine="vllm", ranks=2)


def test_ranks_that_do_not_add_up_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadGroup, "add", lambda self, part: part)
    with pytest.raises(ModelRefused, match="not what transformers computes"):
        shared_out(tmp_path, "llama", 2)


def test_a_rank_that_fails_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: ThreadGroup, part: torch.Tensor) -> torch.Tensor:
        if group.rank == 1:
            raise ModelRefused("no")
        return gather(group, part)

    gather = ThreadGroup.gather
    monkeypatch.setattr(ThreadGroup, "gather", fail)
    with pytest.raises(ModelRefused, match="no"):
        shared_out(tmp_path, "llama", 2)


def test_an_image_that_lacks_a_rank_is_made_again(tmp_path: Path) -> None:
    spec = shared_out(tmp_path, "llama", 2)
    second = Path(spec.shard(1).image_path)
    content = second.read_bytes()
    second.unlink()
    assert shared_out(tmp_path, "llama", 2) == spec
    assert second.read_bytes() == content != Path(spec.image_path).read_bytes()
