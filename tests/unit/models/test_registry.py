"""From a directory to a spec: converted once, found again, rebuilt when damaged, refused in one line."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec, Slo, WeightsName
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models import self_check
from aegis.models.sources import Source
from tests import adapters, checkpoints
from tests.registering import register


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = checkpoints.write(tmp_path / "llama", "llama", tokenizer=True)
    return Source(ModelId("mine"), path=str(path), slo=Slo(1, 2))


def image_of(spec: ModelSpec) -> Path:
    return Path(spec.image_path)


def test_a_model_is_registered_under_its_name(source: Source, tmp_path: Path) -> None:
    spec = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    assert (spec.model, spec.root, spec.slo) == ("mine", source.path, Slo(1, 2))
    directory = tmp_path / "cache" / "images" / spec.manifest.fingerprint
    assert Path(spec.directory) == directory == image_of(spec).parent
    names = {"image.bin", "manifest.json", "config.json", "generation_config.json"}
    assert names | {"tokenizer.json", "detokenizer.json", "tokenizer_config.json", "chat_template.jinja"} == {
        file.name for file in directory.iterdir()
    }


def test_the_second_time_the_image_is_found(source: Source, tmp_path: Path) -> None:
    said: list[str] = []
    first = register(source, dtype="auto", cache_dir=tmp_path / "cache", report=lambda text, _: said.append(text))
    written_ns = image_of(first).stat().st_mtime_ns
    assert "writing the weight image" in said
    said.clear()
    assert (
        register(source, dtype="auto", cache_dir=tmp_path / "cache", report=lambda text, _: said.append(text)) == first
    )
    assert image_of(first).stat().st_mtime_ns == written_ns
    assert said == ["finding the checkpoint", "finding the image"]


def test_an_adapter_beside_the_weights_is_passed_over(source: Source, tmp_path: Path) -> None:
    """transformers would put it into the model where PEFT's package is installed, as it is for tests."""
    pytest.importorskip("peft")
    alone = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    assert alone and source.path
    adapter = adapters.write(tmp_path / "adapter", Path(source.path))
    for file in adapter.iterdir():
        file.rename(Path(source.path) / file.name)
    beside = register(source, dtype="auto", cache_dir=tmp_path / "cache", renew=True)
    assert beside and beside.manifest.tensors == alone.manifest.tensors
    assert beside.manifest.checksums == alone.manifest.checksums


@pytest.mark.parametrize("left", [None, '{"tokenizer": {}, "token_characters_max": 3, "special": {}}'])
def test_an_image_of_an_earlier_version_gets_what_decodes(source: Source, tmp_path: Path, left: str | None) -> None:
    """It is found, not made again."""
    first = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    written_ns = image_of(first).stat().st_mtime_ns
    file = Path(first.directory) / "detokenizer.json"
    whole = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_text(left)
    assert register(source, dtype="auto", cache_dir=tmp_path / "cache") == first
    assert image_of(first).stat().st_mtime_ns == written_ns
    assert file.read_bytes() == whole


@pytest.mark.parametrize("damaged", ["image.bin", "manifest.json", "config.json"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_damaged_image_is_made_again(source: Source, tmp_path: Path, damaged: str, missing: bool) -> None:
    first = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    file = Path(first.directory) / damaged
    whole = file.read_bytes()
    if missing:
        file.unlink()
    else:
        file.write_bytes(whole[:-10])
    assert register(source, dtype="auto", cache_dir=tmp_path / "cache") == first
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("damaged", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", None),
        ("chat_template.jinja", b"\xff"),
        ("detokenizer.json", b"odd"),
    ],
)
def test_an_image_whose_text_cannot_be_read_is_made_again(
    source: Source, tmp_path: Path, damaged: str, content: bytes | None
) -> None:
    """A detokenizer that can be read and is of no use counts; one that cannot be read is made of the tokenizer."""
    first = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    file = Path(first.directory) / damaged
    whole = file.read_bytes()
    if content is None:
        file.unlink()
    elif damaged == "detokenizer.json":
        file.write_bytes(msgspec.json.encode(msgspec.json.decode(whole) | {"decoder": content.decode()}))
    else:
        file.write_bytes(content)
        if damaged == "tokenizer.json":
            (file.parent / "detokenizer.json").unlink()
    assert register(source, dtype="auto", cache_dir=tmp_path / "cache", looks=True) is None
    assert register(source, dtype="auto", cache_dir=tmp_path / "cache") == first
    assert file.read_bytes() == whole


def test_an_image_whose_size_is_right_and_whose_bytes_are_not_is_made_again_where_asked(
    source: Source, tmp_path: Path
) -> None:
    first = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    whole = image_of(first).read_bytes()
    image_of(first).write_bytes(bytes(len(whole)))
    assert register(source, dtype="auto", cache_dir=tmp_path / "cache") == first
    assert image_of(first).read_bytes() != whole
    assert register(source, dtype="auto", cache_dir=tmp_path / "cache", renew=True) == first
    assert image_of(first).read_bytes() == whole


def test_what_a_killed_registrar_left_is_no_image(source: Source, tmp_path: Path) -> None:
    first = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    directory = Path(first.directory)
    draft = directory.with_name(f".{directory.name}.draft")
    directory.rename(draft)
    (draft / "image.bin").write_bytes(b"half")
    assert register(source, dtype="auto", cache_dir=tmp_path / "cache") == first
    assert not draft.exists()


def test_the_sources_own_dtype_goes_first(source: Source, tmp_path: Path) -> None:
    own = Source(source.model, path=source.path, dtype="bfloat16")
    spec = register(own, dtype="float32", cache_dir=tmp_path / "cache")
    assert (spec.manifest.dtype, spec.manifest.kv.dtype, spec.manifest.kv.itemsize) == ("bfloat16", "bfloat16", 2)


def test_auto_keeps_the_checkpoints_dtype(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "half", "llama", dtype=torch.float16)
    spec = register(Source(ModelId("m"), path=str(path)), dtype="auto", cache_dir=tmp_path / "cache")
    assert (spec.manifest.dtype, spec.manifest.kv.dtype) == ("float16", "float16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_packed_for_no_processor_is_one_image_for_all(tmp_path: Path, dtype: torch.dtype) -> None:
    source = Source(ModelId("m"), path=str(checkpoints.write(tmp_path / "m", "llama", dtype=dtype)))
    packed, plain = (register(source, dtype="auto", cache_dir=tmp_path, packs=packs) for packs in (True, False))
    assert packed == plain
    packed, plain = (register(source, dtype="bfloat16", cache_dir=tmp_path, packs=packs) for packs in (True, False))
    assert packed.manifest.fingerprint != plain.manifest.fingerprint


def test_a_checkpoint_without_tokenizer_is_served_by_token_ids(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "bare", "llama")
    said: list[str] = []
    spec = register(
        Source(ModelId("m"), path=str(path)),
        dtype="auto",
        cache_dir=tmp_path / "cache",
        report=lambda text, _: said.append(text),
    )
    assert not (Path(spec.directory) / "tokenizer.json").exists()
    assert "the checkpoint has no tokenizer: only token ids can be sent" in said


def _growing(path: Path) -> None:
    file = path / "tokenizer.json"
    growing = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 5000}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": growing}))


def _edited(**changes: Any) -> Callable[[Path], object]:
    return lambda at: _edit(at, **changes)


SIZES = ("head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size")

BEFORE_WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "template": (lambda at: (at / "chat_template.jinja").write_text("{% endfor %}"), "its chat template, line 1: "),
    "long words": (
        lambda at: (at / "chat_template.jinja").write_text("{{ 1 | " + "a" * 5000 + " }}"),
        "its chat template, line 1: No filter named 'aaa",
    ),
    "tokenizer": (_growing, "its normalizer may make a text 5000 times as long, at most 2048 is accepted"),
    **{
        f"{name} {value}": (_edited(**{name: value}), f": config.json: {name} is {value}; it has to be 1 at least$")
        for name in SIZES
        for value in (0, -1)
    },
    "positions": (
        _edited(max_position_embeddings=10**400),
        f"config.json: max_position_embeddings is 1{'0' * 39}; it may be 2147483647 at most$",
    ),
    "a window": (
        _edited(sliding_window=1 << 63),
        ": config.json: sliding_window is 9223372036854775808; it may be 2147483647 at most$",
    ),
    "configuration": (lambda at: _edit(at, hidden_size="x"), "config.json is not of a llama: .*expected int, got str"),
    "rope": (
        lambda at: _edit(at, rope_parameters={"rope_type": "yarn"}),
        "config.json is not of a llama: Missing required keys in `rope_parameters`.*'factor'",
    ),
}


def _edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", BEFORE_WEIGHTS)
def test_what_cannot_be_served_is_refused_before_weights_are_loaded(name: str, source: Source, tmp_path: Path) -> None:
    spoil, why = BEFORE_WEIGHTS[name]
    spoil(Path(source.root))
    said, weighed = list[str](), list[int]()
    with pytest.raises(ModelRefused, match=why) as caught:
        register(
            source,
            dtype="auto",
            cache_dir=tmp_path / "cache",
            report=lambda text, _: said.append(text),
            weigh=weighed.append,
        )
    message = caught.value.message
    assert message.isprintable() and len(message) <= len(f"{source.root}: ") + 300
    assert "loading the weights" not in said
    assert weighed == [(Path(source.root) / "model.safetensors").stat().st_size]


@pytest.mark.parametrize("names", [5, "LlamaForCausalLM", [5], {"a": 1}])
def test_architectures_that_are_no_names_are_refused(source: Source, tmp_path: Path, names: object) -> None:
    _edit(Path(source.root), architectures=names)
    with pytest.raises(ModelRefused, match=r"config.json: architectures is .*; it has to be a list of names$"):
        register(source, dtype="auto", cache_dir=tmp_path / "cache")


def test_the_end_is_the_configuration_s_where_the_one_of_generation_names_none(source: Source, tmp_path: Path) -> None:
    (Path(source.root) / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    spec = register(source, dtype="auto", cache_dir=tmp_path / "cache")
    assert spec and spec.manifest.eos_token_ids == (1,)


ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "an end": (
        "generation_config.json",
        {"eos_token_id": ""},
        "eos_token_id is ''; it has to be a token id, or a list",
    ),
    "a beginning": (
        "generation_config.json",
        {"bos_token_id": "x"},
        "transformers cannot generate with it; see to its generation_config.json: ",
    ),
    "a type": ("config.json", {"model_type": ["llama"]}, "transformers knows no such model .model_type ..llama..."),
    "results": ("config.json", {"return_dict": None}, "config.json: return_dict is not true"),
    "a token": (
        "tokenizer_config.json",
        {"tokenizer_class": "GemmaTokenizer", "unk_token": "<none>"},
        r"its tokenizer.json cannot be read: ",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_values_that_only_show_when_they_are_used_are_refused_in_a_line(
    source: Source, tmp_path: Path, name: str
) -> None:
    file, changes, said = ODD[name]
    path = Path(source.root) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def check(spec: ModelSpec, model: PreTrainedModel) -> None:
        self_check.check(spec, model, TransformersEngine)

    with pytest.raises(ModelRefused, match=said) as caught:
        register(source, dtype="auto", cache_dir=tmp_path / "cache", check=check)
    assert "\n" not in caught.value.message


def test_a_rope_that_is_not_known_is_named(source: Source, tmp_path: Path) -> None:
    _edit(Path(source.root), rope_parameters={"rope_type": "nope", "rope_theta": 1})
    with pytest.raises(ModelRefused, match=r"transformers cannot load it: 'nope' is not given, or not known$"):
        register(source, dtype="auto", cache_dir=tmp_path / "cache")


def test_a_way_of_routing_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """transformers finds a variable without a value then, which is a NameError."""
    path = checkpoints.write(tmp_path / "deepseek", "deepseek_v2", topk_method="best")
    with pytest.raises(ModelRefused, match=r"deepseek: DeepseekV2ForCausalLM fails when it is run: "):
        register(Source(ModelId("mine"), path=str(path)), dtype="auto", cache_dir=tmp_path / "cache")


def test_a_model_that_fails_its_check_leaves_no_image(source: Source, tmp_path: Path) -> None:
    def check(spec: ModelSpec, model: PreTrainedModel) -> None:
        assert image_of(spec).is_file()
        raise ModelRefused("it is not what it seems")

    with pytest.raises(ModelRefused, match=rf"^{source.path}: it is not what it seems$"):
        register(source, dtype="auto", cache_dir=tmp_path / "cache", check=check)
    assert [file.name for file in (tmp_path / "cache" / "images").iterdir() if not file.name.endswith(".lock")] == []


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "llama", "llama")
    deeper = checkpoints.config("llama", num_hidden_layers=3)
    deeper.architectures = ["LlamaForCausalLM"]
    deeper.save_pretrained(path)
    with pytest.raises(ModelRefused, match=r"the weights lack model.layers.2.\S+, and 8 more"):
        register(Source(ModelId("m"), path=str(path)), dtype="auto", cache_dir=tmp_path / "cache")


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "llama", "llama")
    wider = checkpoints.config("llama", intermediate_size=128)
    wider.architectures = ["LlamaForCausalLM"]
    wider.save_pretrained(path)
    with pytest.raises(
        ModelRefused,
        match=r"have model.layers.0.mlp.\S+ in another shape, \[64, 96\] instead of \[64, 128\], and 5 more",
    ):
        register(Source(ModelId("m"), path=str(path)), dtype="auto", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "no-such-model"}', "transformers knows no such model .model_type 'no-such-model'."),
        ("{}", "config.json has no model_type"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}}', "transformers knows no such model"),
    ],
)
def test_unknown_and_remote_code_architectures_are_refused(tmp_path: Path, config: str, said: str) -> None:
    path = checkpoints.write(tmp_path / "llama", "llama")
    (path / "config.json").write_text(config)
    (path / "evil.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(ModelRefused, match=said) as caught:
        register(Source(ModelId("m"), path=str(path)), dtype="auto", cache_dir=tmp_path / "cache")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("model_type", "said"), [("bert", "it is an encoder"), ("bloom", "an attention of its own"), ("mamba", "recurrent")]
)
def test_unsupported_architectures_are_refused_in_one_line(tmp_path: Path, model_type: str, said: str) -> None:
    path = checkpoints.write(tmp_path / model_type, model_type)
    with pytest.raises(ModelRefused, match=said) as caught:
        register(Source(ModelId("m"), path=str(path)), dtype="auto", cache_dir=tmp_path / "cache")
    assert caught.value.message.startswith(str(path))
    assert "\n" not in caught.value.message


def test_the_loaded_reference_is_the_checkpoint(source: Source, tmp_path: Path) -> None:
    """The model handed to the check computes what transformers computes."""
    seen: list[torch.Tensor] = []

    def check(_: ModelSpec, model: PreTrainedModel) -> None:
        seen.append(model(torch.tensor([[1, 2, 3]])).logits)

    register(source, dtype="auto", cache_dir=tmp_path / "cache", check=check)
    expected = AutoModelForCausalLM.from_pretrained(source.path, attn_implementation="eager").eval()
    assert torch.equal(seen[0], expected(torch.tensor([[1, 2, 3]])).logits)


def test_a_checkpoint_far_too_large_is_not_even_loaded(tmp_path: Path) -> None:
    source = Source(ModelId("m"), path=str(checkpoints.write(tmp_path / "m", "llama")))
    said: list[str] = []
    with pytest.raises(ModelRefused, match=r"its weights are \d+ MiB, a device holds 0 MiB"):
        register(
            source,
            dtype="auto",
            cache_dir=tmp_path / "cache",
            limit_bytes=1000,
            report=lambda text, _: said.append(text),
        )
    assert "loading the weights" not in said


@pytest.mark.parametrize(("weights", "times"), [("dense", 2), ("int8", 4), ("int4", 8), ("int4-g32", 8)])
def test_a_checkpoint_is_loaded_that_may_fit_once_it_is_quantised(
    tmp_path: Path, weights: WeightsName, times: int
) -> None:
    source = Source(ModelId("m"), path=str(checkpoints.write(tmp_path / "m", "llama")), weights=weights)
    stored = (tmp_path / "m" / "model.safetensors").stat().st_size
    ask = partial(register, source, dtype="auto", cache_dir=tmp_path / "cache", looks=True)
    assert ask(limit_bytes=stored // times + 1) is None  # it can be registered, as far as is known without its weights
    with pytest.raises(ModelRefused, match="raise --device-memory"):
        ask(limit_bytes=(stored - 1) // times)
