"""What a checkpoint says of how its texts become vectors or scores, in the files of sentence-transformers or in its
configuration. Without torch, as `checkpoint` is.

1. Sequence classification with one label scores pairs of texts.
2. A `modules.json` names the modules behind the transformer: pooling, and normalisation if any.
3. Without one, an architecture without any head is pooled: by its last token if it only looks back, else by the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from aegis.core.errors import ModelRefused
from aegis.core.model import Dense, Pooling, PoolingMode
from aegis.models.checkpoint import Checkpoint, read_small_json

MODULES = "modules.json"
DENSE_MAX, DIMENSIONS_MAX = 4, 1 << 16
PROMPTS_MAX, PROMPT_CHARACTERS_MAX = 64, 1 << 14
_CLASSIFIER = "ForSequenceClassification"
_HEADLESS = "Model"
_GENERATING = "LMHeadModel"
_TRANSFORMERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""The first one's file is of all; those of others are from before that."""

_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
_FLAGS: dict[str, PoolingMode] = {  # of files from before there was `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TANH, _VECTOR = "torch.nn.modules.activation.Tanh", "sentence_embedding"
_SIGMOID, _AS_IT_IS = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


def pools(checkpoint: Checkpoint) -> bool:
    """Whether it is a model that pools; else it generates, or is refused."""
    name = _architecture(checkpoint)
    if checkpoint.gguf:  # whatever else is where it lies
        return False
    if name.endswith(_CLASSIFIER):
        return True
    return (checkpoint.directory / MODULES).is_file() or (name.endswith(_HEADLESS) and not name.endswith(_GENERATING))


def read_pooling(checkpoint: Checkpoint, *, hidden_size: int, looks_back: bool) -> Pooling:
    """Of a checkpoint that pools; `looks_back`: no token attends to later ones. Raises ModelRefused for what cannot be
    served."""
    if _architecture(checkpoint).endswith(_CLASSIFIER):
        return _scoring(checkpoint)
    if (checkpoint.directory / MODULES).is_file():
        return _of_modules(checkpoint, hidden_size)
    return Pooling(hidden_size, ("lasttoken" if looks_back else "mean",))


def longest_text(checkpoint: Checkpoint, context_tokens: int) -> int:
    """The most tokens of a text that is served: as far as its positions go, and no further than it was trained for."""
    tokenizer = checkpoint.directory / "tokenizer_config.json"
    told = [_of_transformer(checkpoint.directory).get("max_seq_length")]
    told += [read_small_json(tokenizer).get("model_max_length")] if tokenizer.is_file() else []
    lengths = [each for each in told if isinstance(each, int) and not isinstance(each, bool) and each > 0]
    return min([context_tokens, *lengths])


def _architecture(checkpoint: Checkpoint) -> str:
    named = checkpoint.config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def _scoring(checkpoint: Checkpoint) -> Pooling:
    labels = checkpoint.config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else checkpoint.config.get("num_labels", 2)
    if count != 1:
        raise ModelRefused(
            f"{_architecture(checkpoint)} has {count} labels; with one label it could rank texts, classifiers are not "
            "served"
        )
    own = checkpoint.config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    activation = named or checkpoint.config.get("sbert_ce_default_activation_function") or _SIGMOID
    if activation not in (_SIGMOID, _AS_IT_IS):
        raise ModelRefused(f"config.json: its scores go through {activation!r}, which is not known here")
    return Pooling(1, scores=True, sigmoid=activation == _SIGMOID)


def _of_modules(checkpoint: Checkpoint, hidden_size: int) -> Pooling:
    directory = checkpoint.directory
    modules = read_small_json(directory / MODULES, list)
    kinds = [_kind(each) if isinstance(each, dict) else "" for each in modules]
    paths = [str(each.get("path", "")) if isinstance(each, dict) else "" for each in modules]
    if kinds[:1] != ["Transformer"] or paths[0] not in ("", "."):
        raise ModelRefused(f"{MODULES}: its first module has to be a Transformer beside this file")
    behind = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    if kinds[1:2] != ["Pooling"] or len(behind) > DENSE_MAX or any(kind != "Dense" for kind in behind):
        strange = next((kind for kind in kinds[1:] if kind not in ("Pooling", "Dense", "Normalize")), "")
        told = f"the module {strange!r} is not known here" if strange else f"its modules are {', '.join(kinds)}"
        raise ModelRefused(f"{MODULES}: {told}; a Transformer, Pooling, up to {DENSE_MAX} Dense and Normalize are")
    for path in paths[1 : 2 + len(behind)]:
        if Path(path).name != path or not path.strip("."):
            raise ModelRefused(f"{MODULES}: {path!r} is not the name of a directory beside it")
    pooling = read_small_json(directory / paths[1] / "config.json")
    modes = _modes(pooling)
    prompt, prompts = _prompts(directory)
    if (prompt or any(text for _, text in prompts)) and pooling.get("include_prompt") is False:
        raise ModelRefused(f"{paths[1]}/config.json leaves the prompt out of the pooling, which is not known here")
    dense = _dense(directory, paths[2 : 2 + len(behind)], hidden_size * len(modes))
    return Pooling(
        dense[-1].dimensions if dense else hidden_size * len(modes),
        modes,
        dense,
        normalises=kinds[-1] == "Normalize",
        prompt=prompt,
        prompts=prompts,
        lowercases=_lowercases(directory),
    )


def dense_directories(checkpoint: Checkpoint) -> list[Path]:
    """The directories of the layers behind a checkpoint's pooling, in their order, once that was read."""
    if not (checkpoint.directory / MODULES).is_file():
        return []
    modules = read_small_json(checkpoint.directory / MODULES, list)
    return [checkpoint.directory / each["path"] for each in modules if _kind(each) == "Dense"]


def _kind(module: dict[str, Any]) -> str:
    """The module's class, without the package that it is in."""
    return str(module.get("type", "")).rpartition(".")[2]


def _dense(directory: Path, paths: Sequence[str], size: int) -> tuple[Dense, ...]:
    layers = list[Dense]()
    for path in paths:
        config = read_small_json(directory / path / "config.json")
        activation, out = config.get("activation_function", _TANH), config.get("out_features")
        inner = config.get("use_residual") or config.get("module_input_name", _VECTOR) != _VECTOR
        if inner or config.get("module_output_name") not in (None, _VECTOR):
            raise ModelRefused(f"{path}/config.json: a Dense module beside the vectors is not known here")
        if activation not in (_TANH, _AS_IT_IS):
            raise ModelRefused(f"{path}/config.json: the activation {activation!r} is not known here")
        if config.get("in_features") != size or type(out) is not int or not 0 < out <= DIMENSIONS_MAX:
            raise ModelRefused(f"{path}/config.json: it does not take vectors of {size} values to others")
        layers.append(Dense(out, config.get("bias") is not False, activation == _TANH))
        size = out
    return tuple(layers)


def _lowercases(directory: Path) -> bool:
    return _of_transformer(directory).get("do_lower_case") is True


def _of_transformer(directory: Path) -> dict[str, Any]:
    """What it does to texts before its model does."""
    files = (directory / f"sentence_{kind}_config.json" for kind in _TRANSFORMERS)
    file = next((file for file in files if file.is_file()), None)
    found: dict[str, Any] = read_small_json(file) if file else {}
    return found


def _modes(pooling: dict[str, Any]) -> tuple[PoolingMode, ...]:
    named = pooling.get("pooling_mode")
    if named is None:
        return tuple(mode for flag, mode in _FLAGS.items() if pooling.get(flag) is True) or ("mean",)
    modes = named if isinstance(named, list) else [named]
    if not modes or not all(isinstance(mode, str) and mode in _MODES for mode in modes):
        raise ModelRefused(f"the pooling mode {named!r} is not known; {', '.join(_MODES)} are")
    return tuple(cast("list[PoolingMode]", modes))


def _prompts(directory: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The one that is used where none is named, and all by name."""
    file = directory / "config_sentence_transformers.json"
    if not file.is_file():
        return "", ()
    config = read_small_json(file)
    named = config.get("prompts")
    prompts = {name: text for name, text in named.items() if isinstance(text, str)} if isinstance(named, dict) else {}
    if len(prompts) > PROMPTS_MAX or sum(map(len, prompts.values())) > PROMPT_CHARACTERS_MAX:
        raise ModelRefused(
            f"{file.name}: more than {PROMPTS_MAX} prompts, or {PROMPT_CHARACTERS_MAX} characters of them"
        )
    default = config.get("default_prompt_name")
    return prompts.get(default, "") if isinstance(default, str) else "", tuple(sorted(prompts.items()))
