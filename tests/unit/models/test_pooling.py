"""Models that pool, from directories to vectors: as sentence-transformers has them, or refused in a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import ModelSpec, Pooling
from aegis.core.request import Sampling
from aegis.engine import pooled_models
from aegis.engine.engines import Engines, backend_of, engine_class
from aegis.engine.pooled_models import PooledModel, Text
from aegis.engine.protocol import KvRegion, StepRow
from aegis.models import pooled_check
from aegis.models.sources import Source
from aegis.models.text.text_model import TextModel
from tests import checkpoints, embedders
from tests.long_forms import first_of
from tests.registering import register

TEXTS = ("the cat sat on the mat", "a hat", "rain fell into seas of blue while they ran again over green hills", "then")
PAIRS = tuple(("green hills", text) for text in TEXTS)
CLOSE = 1e-4
MEANS = {"pooling_mode_mean_tokens": True}


def check(spec: ModelSpec, model: Any) -> None:
    pooled_check.check(spec, model, engine_class(backend_of(spec.manifest)))


def registered(path: Path, *, dtype: str = "float32", **given: Any) -> ModelSpec:
    source = Source(ModelId(path.name), path=str(path))
    return register(source, dtype=dtype, cache_dir=path.parent / "cache", check=check, **given)


def vectors(spec: ModelSpec, texts: Sequence[str | tuple[str, str]]) -> Any:
    """All in one step of an engine."""
    text, pooling = TextModel.load(Path(spec.directory)), spec.manifest.pooling
    assert text and pooling
    engine, weights = (
        Engines(KvRegion(0, 0, 1), device="cpu", first="transformers"),
        np.memmap(spec.image_path, mode="c"),
    )
    engine.attach(spec, weights.ctypes.data)
    rows = []
    for number, (tokens, pair_at) in enumerate(text.fit([_prompted(pooling, each) for each in texts], None)):
        sampling = Sampling(max_tokens=1, pools=True, pair_at=pair_at)
        engine.start(spec.model, RequestId(number), tokens, (), sampling)
        rows.append(StepRow(RequestId(number), tokens, 0, np.empty(0, np.int64)))
    made = [np.frombuffer(each.token.vector or b"", "<f4") for each in engine.step(spec.model, rows) if each]
    engine.detach(spec.model)
    return np.stack(made)


def _prompted(pooling: Pooling, text: str | tuple[str, str]) -> str | tuple[str, str]:
    return pooling.prompt + text if isinstance(text, str) else text


@pytest.mark.parametrize(
    ("model_type", "pooling", "prompt"),
    [
        ("bert", MEANS, ""),
        ("bert", {"pooling_mode": "weightedmean"}, ""),
        ("bert", {"pooling_mode": "mean_sqrt_len_tokens"}, ""),
        ("roberta", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ""),
        ("xlm-roberta", {"pooling_mode": ["mean", "max"]}, "the "),
        ("modernbert", {"pooling_mode": "mean"}, ""),
        ("mpnet", MEANS, ""),
        ("qwen3", {"pooling_mode_lasttoken": True}, "a cat and "),
    ],
)
@pytest.mark.parametrize("normalises", first_of(1, [True, False]))
def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, model_type: str, pooling: dict[str, Any], prompt: str, normalises: bool
) -> None:
    reference = pytest.importorskip("sentence_transformers")
    path = embedders.write(tmp_path / "m", model_type, pooling=pooling, prompt=prompt, normalises=normalises)
    expected = reference.SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    assert np.abs(vectors(registered(path), TEXTS) - expected).max() < CLOSE


def test_scores_that_attention_makes_at_a_time_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = embedders.write(tmp_path / "m", "mpnet")
    module = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    texts = [Text([at + 4] * 10) for at in range(6)]
    expected, passes = PooledModel(module, Pooling(32, ("mean",))).vectors(texts), list[int]()
    module.register_forward_hook(lambda _, __, output: passes.append(len(output.last_hidden_state)))
    monkeypatch.setattr(pooled_models, "SCORES_MAX", 2 * 4 * 10 * 10)  # of two texts, by four heads
    found = PooledModel(module, Pooling(32, ("mean",))).vectors(texts)
    assert passes == [2, 2, 2] and (found - expected).abs().max() < CLOSE


def test_scores_that_attention_makes_of_a_text_are_bounded(tmp_path: Path) -> None:
    for model_type, longest in (("gemma2", 4096), ("qwen3", 9000)):  # the latter's attention is fused
        path = embedders.write(tmp_path / model_type, model_type, max_position_embeddings=9000)
        (path / "tokenizer_config.json").unlink()
        assert registered(path).manifest.context_tokens == longest


@pytest.mark.parametrize("dense", [(16,), (48, 8)])
def test_layers_behind_the_pooling_are_run(tmp_path: Path, dense: tuple[int, ...]) -> None:
    reference = pytest.importorskip("sentence_transformers")
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS, dense=dense)
    expected = reference.SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    spec = registered(path)
    assert np.abs(vectors(spec, TEXTS) - expected).max() < CLOSE
    assert spec.manifest.pooling and spec.manifest.pooling.dimensions == expected.shape[1] == dense[-1]


def test_a_layer_that_is_not_what_its_configuration_says_is_refused(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS, dense=(16,))
    first, config = registered(path), path / "2_Dense" / "config.json"
    for changes, said in (
        ({"in_features": 31}, "does not take vectors of 32 values"),
        ({"out_features": 1 << 40}, "does not take vectors of 32 values"),
        ({"activation_function": "os.system"}, "is not known here"),
        ({"use_residual": True}, "beside the vectors"),
        ({"out_features": 15}, "it has"),
    ):
        before = config.read_text()
        _change(config, **changes)
        with pytest.raises(ModelRefused, match=said):
            registered(path)
        config.write_text(before)
    weights = load_file(path / "2_Dense" / "model.safetensors")
    save_file({name: each + 1 for name, each in weights.items()}, path / "2_Dense" / "model.safetensors")
    second = registered(path)
    assert first.manifest.fingerprint != second.manifest.fingerprint
    assert np.abs(vectors(first, TEXTS) - vectors(second, TEXTS)).max() > CLOSE
    (path / "2_Dense" / "model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(ModelRefused, match="not readable"):
        registered(path)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta", "modernbert", "qwen3", "deberta-v2"])
def test_scores_are_those_of_a_cross_encoder(tmp_path: Path, model_type: str) -> None:
    reference = pytest.importorskip("sentence_transformers")
    path = embedders.write_reranker(tmp_path / "m", model_type)
    expected = reference.CrossEncoder(str(path), device="cpu").predict(list(PAIRS))
    assert np.abs(vectors(registered(path), PAIRS)[:, 0] - expected).max() < CLOSE


def test_scores_stay_as_they_are_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    squeezed = vectors(registered(embedders.write_reranker(tmp_path / "a", "bert")), PAIRS)
    path = embedders.write_reranker(tmp_path / "b", "bert")
    _change(path / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    plain = vectors(registered(path), PAIRS)
    assert np.abs(1 / (1 + np.exp(-plain)) - squeezed).max() < CLOSE


def test_without_any_files_encoders_take_the_mean_and_decoders_the_last_token(tmp_path: Path) -> None:
    encoder = registered(embedders.write(tmp_path / "bert", "bert"))
    decoder = registered(embedders.write(tmp_path / "qwen3", "qwen3"))
    assert encoder.manifest.pooling == Pooling(32, ("mean",)) and decoder.manifest.pooling == Pooling(
        32, ("lasttoken",)
    )
    hidden = _hidden(Path(encoder.root), TEXTS[0])
    assert np.abs(vectors(encoder, TEXTS[:1])[0] - hidden.mean(0)).max() < CLOSE
    assert np.abs(vectors(decoder, TEXTS[:1])[0] - _hidden(Path(decoder.root), TEXTS[0])[-1]).max() < CLOSE


def test_all_prompts_are_known_by_name(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    prompts = {"query": "the ", "passage": "", "odd": 1}
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    pooling = registered(path).manifest.pooling
    assert pooling and (pooling.prompt, pooling.prompts) == ("", (("passage", ""), ("query", "the ")))
    (path / "1_Pooling" / "config.json").write_text(json.dumps(MEANS | {"include_prompt": False}))
    with pytest.raises(ModelRefused, match="leaves the prompt out of the pooling"):
        registered(path)


def test_kinds_of_modules_are_known_without_their_packages(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS, dense=(24,))
    modules = json.loads((path / "modules.json").read_text())
    bare = [each | {"type": each["type"].rpartition(".")[2]} for each in modules]
    (path / "modules.json").write_text(json.dumps(bare))
    pooling = registered(path).manifest.pooling
    assert pooling and pooling.dimensions == 24


@pytest.mark.parametrize(
    ("write", "texts"),
    [(partial(embedders.write, pooling=MEANS), TEXTS), (embedders.write_reranker, PAIRS)],
    ids=["embedder", "reranker"],
)
def test_texts_are_padded_by_what_the_vocabulary_has(
    tmp_path: Path, write: Callable[..., Path], texts: Sequence[str | tuple[str, str]]
) -> None:
    spec = registered(write(tmp_path / "m", "qwen3", pad_token_id=-1))
    alone = np.concatenate([vectors(spec, [text]) for text in texts])
    assert np.abs(vectors(spec, texts) - alone).max() < CLOSE


def test_whether_texts_are_lowered_is_known(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    _change(path / "sentence_bert_config.json", do_lower_case=True)
    pooling = registered(path).manifest.pooling
    assert pooling and pooling.lowercases


def test_the_file_of_an_early_checkpoint_is_named_after_its_architecture(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "roberta", pooling=MEANS)
    (path / "sentence_bert_config.json").rename(path / "sentence_roberta_config.json")
    _change(path / "sentence_roberta_config.json", do_lower_case=True, max_seq_length=20)
    manifest = registered(path).manifest
    assert manifest.context_tokens == 20 and manifest.pooling and manifest.pooling.lowercases


def test_a_layer_that_is_not_read_may_be_missing(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    weights = load_file(path / "model.safetensors")
    whole = vectors(registered(path), TEXTS)
    save_file(
        {name: each for name, each in weights.items() if not name.startswith("pooler.")},
        path / "model.safetensors",
        {"format": "pt"},
    )
    spec = registered(path)
    assert np.array_equal(vectors(spec, TEXTS), whole)
    assert not any("pooler" in name for entry in spec.manifest.tensors for name in entry.names)


def test_texts_end_where_the_positions_or_the_training_end(tmp_path: Path) -> None:
    trained = registered(embedders.write(tmp_path / "a", "roberta", pooling=MEANS))
    bare = registered(embedders.write(tmp_path / "b", "roberta", max_position_embeddings=40))
    assert trained.manifest.context_tokens == 48 and bare.manifest.context_tokens == 39


def test_another_pooling_makes_another_image(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    first = registered(path)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    second = registered(path)
    assert first.manifest.fingerprint != second.manifest.fingerprint
    assert second.manifest.pooling == Pooling(32, ("max",), normalises=True)


def test_a_causal_model_with_modules_pools_and_one_without_generates(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "m", "llama", tokenizer=True)
    generating = register(Source(ModelId("m"), path=str(path)), dtype="float32", cache_dir=tmp_path / "cache")
    embedders.write_modules(path, {"pooling_mode": "lasttoken"}, normalises=True, prompt="")
    pooling = registered(path)
    assert generating.manifest.pooling is None and pooling.manifest.pooling is not None
    assert pooling.manifest.architecture == "LlamaModel" and not pooling.manifest.kv.layers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_check_when_it_is_registered(tmp_path: Path, dtype: str) -> None:
    spec = registered(embedders.write(tmp_path / "m", "bert", pooling=MEANS, hidden_size=256), dtype=dtype, packs=True)
    assert spec.manifest.dtype == dtype and np.isfinite(vectors(spec, TEXTS)).all()


def test_a_model_that_fails_when_it_is_run_is_refused(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": float("nan")}))
    with pytest.raises(ModelRefused, match="BertModel fails when it is run: dropout probability has to be between"):
        registered(path)


def test_a_model_without_a_table_of_tokens_is_refused(tmp_path: Path) -> None:
    """As one that reads characters: texts are tokens here."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    AutoModel.from_config(AutoConfig.for_model("canine", **sizes)).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelRefused, match=r"m: CanineModel does not look tokens up in a table$"):
        registered(tmp_path / "m")


def test_a_model_that_is_run_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pooled_check._TOLERANCE, "float32", -1.0)
    with pytest.raises(ModelRefused, match="its vectors are not what transformers computes"):
        registered(embedders.write(tmp_path / "m", "bert", pooling=MEANS))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("modules.json", [], "its first module has to be a Transformer"),
        ("modules.json", {}, "expected a JSON list"),
        ("modules.json", [{"path": "0_Transformer", "type": "x.Transformer"}], "has to be a Transformer beside"),
        ("modules.json", [{"path": "", "type": "x.Transformer"}, {"path": "2_CNN", "type": "x.CNN"}], "'CNN'"),
        ("modules.json", [{"path": "", "type": "x.Transformer"}, {"path": "../x", "type": "x.Pooling"}], "'../x'"),
        ("modules.json", [{"path": "", "type": "x.Transformer"}, {"path": "..", "type": "x.Pooling"}], "'..'"),
        ("modules.json", [{"path": "", "type": "x.Transformer"}, {"path": "gone", "type": "x.Pooling"}], "gone/config"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "the pooling mode 'median' is not known"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "is not known"),
        ("1_Pooling/config.json", [1], "expected a JSON object"),
        ("config_sentence_transformers.json", {"prompts": {str(n): "" for n in range(65)}}, "more than 64 prompts"),
        ("config_sentence_transformers.json", {"prompts": {"query": "a" * 20_000}}, "16384 characters"),
    ],
)
def test_files_that_say_something_else_are_refused(tmp_path: Path, file: str, content: Any, said: str) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    (path / file).write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match=said) as caught:
        registered(path)
    assert caught.value.message.startswith(str(path)) and "\n" not in caught.value.message


def test_what_is_no_small_file_in_a_directory_of_modules_is_refused_and_not_opened(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    config = path / "1_Pooling" / "config.json"
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(ModelRefused, match=r"1_Pooling/config\.json is no file"):
        registered(path)
    config.unlink()
    with config.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelRefused, match=r"1_Pooling/config\.json has 1048576 MiB, at most 1 are read"):
        registered(path)


def test_a_classifier_and_an_unknown_activation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="has 3 labels"):
        registered(embedders.write_reranker(tmp_path / "a", "bert", labels=3))
    path = embedders.write_reranker(tmp_path / "b", "bert")
    _change(path / "config.json", sentence_transformers={"activation_fn": "os.system"})
    with pytest.raises(ModelRefused, match="which is not known here"):
        registered(path)


def test_ranks_are_refused_and_the_other_engine_is_not_asked(tmp_path: Path) -> None:
    path = embedders.write(tmp_path / "m", "bert", pooling=MEANS)
    with pytest.raises(ModelRefused, match="leave out --tensor-parallel-size"):
        registered(path, ranks=2)
    assert registered(path, engine="vllm").manifest.engine == "transformers"


def _hidden(path: Path, text: str) -> Any:
    model, tokenizer = AutoModel.from_pretrained(path).eval(), TextModel.load(path)
    assert tokenizer
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokenizer.encode(text)])).last_hidden_state[0].numpy()


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
