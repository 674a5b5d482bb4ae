"""A checkpoint directory as found: its configuration and its safetensors files, both known to be readable.

Everything here is decided without torch, from a few kilobytes: a broken checkpoint is refused before anything is
loaded.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors import SafetensorError, safe_open

from aegis.core.errors import ModelRefused
from aegis.models.failures import one_line
from aegis.models.gguf.checkpoint import is_gguf, open_gguf
from aegis.models.gguf.header import GgufFile
from aegis.models.quantised.configuration import comes_quantised, scheme_of
from aegis.process.error_lines import flattened

JSON_BYTES_MAX = 64 << 20
SMALL_JSON_BYTES_MAX = 1 << 20
TOKENIZER_BYTES_MAX = 512 << 20
_TOKENIZERS = ("tokenizer.json", "vocab.json")
VOCABULARIES = (".bpe", ".model", ".spm", ".tiktoken", ".vocab")
"""The ends of names that tokenizers' files have, beside those of texts."""

_BESIDE_WEIGHTS = (".jinja", ".json", ".py", ".txt", *VOCABULARIES)
TEMPLATES = "additional_chat_templates"
"""The one directory of a checkpoint that transformers looks into."""


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def other_than_file(mode: int) -> str:
    """What it is that `stat` gives this mode, in words; empty for a regular file."""
    return "" if stat.S_ISREG(mode) else next((kind for has, kind in _KINDS if has(mode)), "something else")


def refuse_odd_files(directory: Path) -> None:
    """A foreign file may be anything, and endless. Raises ModelRefused if an entry is neither a file nor a directory,
    wherever links lead, if a file beside the weights is too large, or if it may not look. Opens none."""
    within = directory / TEMPLATES
    try:
        entries = [*directory.iterdir(), *(within.iterdir() if within.is_dir() else ())]
    except OSError as error:
        where = "its directory" if error.filename is None or Path(error.filename) == directory else TEMPLATES
        raise ModelRefused(f"{where}: {error.strerror}") from None
    for entry in sorted(entries):
        _refuse_odd(entry, str(entry.relative_to(directory)))


def _refuse_odd(entry: Path, name: str) -> None:
    try:
        found = entry.stat()
    except FileNotFoundError:  # a link to nothing
        return
    except OSError as error:
        raise ModelRefused(f"{name}: {error.strerror}") from None
    if stat.S_ISDIR(found.st_mode):
        return
    if other := other_than_file(found.st_mode):
        raise ModelRefused(f"{name} is no file, but {other}; take it out of the directory")
    if entry.suffix in _BESIDE_WEIGHTS:
        large = entry.name in _TOKENIZERS or entry.suffix in VOCABULARIES
        most = TOKENIZER_BYTES_MAX if large else JSON_BYTES_MAX
        if found.st_size > most:
            raise ModelRefused(f"{name} has {found.st_size >> 20} MiB, at most {most >> 20} are read")


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYER_COUNT = re.compile(r"(?:n|num)_(?:\w+_)?layers?|(?:de|en)coder_layers")
_HEADS = ("n_head", "n_heads", "num_attention_heads", "num_heads", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("d_model", "ffn_dim", "head_dim", "hidden_size", "intermediate_size", "n_embd", "n_inner", "vocab_size")
_DIMENSIONS = (*_HEADS, *_WIDTHS)
"""Sizes that are dimensions of tensors, or divide one."""
_COUNTS = ("max_position_embeddings", "n_layer", "n_layers", "n_positions", "num_hidden_layers", "num_layers")
_COUNT_MAX = (1 << 31) - 1
_LABELS_MAX = 1 << 20
"""transformers makes a name for each, for models without labels too, in every process that reads the configuration."""

_ELEMENTS_A_BYTE = 4
"""At most: no scheme of quantised weights has less than 2 bits for one."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Checkpoint(Struct, frozen=True):
    """Of a GGUF file the configuration is made of its header, and the directory is the one in which it lies."""

    directory: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]  # sorted by name
    gguf: GgufFile | None = None

    @property
    def comes_quantised(self) -> bool:
        return self.gguf is not None or comes_quantised(self.config)

    @property
    def quantised_by(self) -> str:
        """The method, as `config.json` names it; empty for weights that are numbers."""
        told = self.config.get("quantization_config")
        method = told.get("quant_method") if isinstance(told, dict) else None
        return (str(method)[:40] if method else "quantised") if told is not None else ""

    @property
    def stored_bytes(self) -> int:
        """The bytes of its weights; of a GGUF file the bytes that they take at least once they are served."""
        if self.gguf:
            return gguf_bytes(self.gguf, self.weights[0].stat().st_size)
        return sum(file.stat().st_size for file in self.weights)

    @property
    def loaded_bytes(self) -> int:
        """The bytes that its weights take at most once all of them are numbers. Raises ModelRefused."""
        if self.gguf:
            return max(self.weights[0].stat().st_size, 2 * self.gguf.elements)
        scheme = scheme_of(self.config)
        return self.stored_bytes * (scheme.growth if scheme else 1)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Raises ModelRefused for a missing or unreadable configuration, and for weights that are pickled, missing,
    truncated or not what their headers or their index say. The reason does not repeat the directory."""
    try:
        gguf, there = is_gguf(directory), directory.is_dir()
    except OSError as error:  # a link may lead where this user may not look
        raise ModelRefused(f"it cannot be looked at: {error.strerror}") from None
    if gguf:
        return open_gguf_checkpoint(directory)
    if not there:
        raise ModelRefused(_why_no_directory(directory))
    if not os.access(directory, os.R_OK | os.X_OK):
        raise ModelRefused("its directory may not be read by this user; allow that, or take it out")
    refuse_odd_files(directory)
    if not (directory / "config.json").is_file():
        raise ModelRefused("there is no config.json, so it is not a checkpoint")
    config = _read_json(directory / "config.json", "config.json")
    if named := config.get("transformers_weights"):
        raise ModelRefused(f"config.json: transformers_weights is {named!r}; only {_SINGLE} or {_INDEX} are read")
    _refuse_other_names(config)
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        expected: dict[Path, set[str]] = {directory / _SINGLE: set()}
    elif index.is_file():
        expected = _read_index(index)
    else:
        raise ModelRefused(_why_no_weights(directory))
    tensors = sum(_check_weights(file, named) for file, named in expected.items())
    _refuse_larger_sizes(config, sum(file.stat().st_size for file in expected))
    _refuse_more_layers(config, tensors)
    return Checkpoint(directory, config, tuple(sorted(expected)))


def _why_no_directory(path: Path) -> str:
    """Why what is no directory is none of a checkpoint."""
    try:
        other = other_than_file(path.stat().st_mode)
    except OSError:
        return "no such directory"
    return f"it is {other or 'a file'}; a checkpoint is a directory or a .gguf file"


def open_gguf_checkpoint(path: Path, weights: Path | None = None) -> Checkpoint:
    """The `weights` are perhaps elsewhere than a file that has their header. Raises ModelRefused."""
    file, config = open_gguf(path)
    _refuse_more_layers(config, len(file.tensors))
    weights = weights or path
    return Checkpoint(weights.parent, config, (weights,), file)


def gguf_bytes(file: GgufFile, file_bytes: int) -> int:
    """What its weights take at least once they are served."""
    return max(file_bytes, file.served_bytes)


def _why_no_weights(directory: Path) -> str:
    pickled = sorted(file.name for pattern in _PICKLED for file in directory.glob(pattern))
    if pickled:
        return f"its weights are pickled ({pickled[0]}), which can run any code: convert them to safetensors"
    return f"there are no weights: expected {_SINGLE} or {_INDEX}"


def _read_index(index: Path) -> dict[Path, set[str]]:
    weight_map = _read_json(index, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{index.name}: it has no weight_map")
    expected: dict[Path, set[str]] = {}
    for tensor, shard in sorted(weight_map.items()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelRefused(f"{index.name}: {shard!r} is not the name of a file beside it")
        expected.setdefault(index.parent / shard, set()).add(tensor)
    for file in expected:
        if not file.is_file():
            raise ModelRefused(f"the shard {file.name}, named in {_INDEX}, is missing")
    return expected


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers in it, with their names, and in the objects in it."""
    inner = [part for part in config.values() if isinstance(part, dict)]
    for part in [config, *inner]:
        for name, value in part.items():
            if isinstance(value, int) and not isinstance(value, bool):
                yield name, value


def refuse_empty_sizes(config: dict[str, Any]) -> None:
    """Raises ModelRefused for a size below 1, of which no model can be made, and for one that no library counts to. To
    be asked once it is known that models of this kind are served: some of others have heads of size 0."""
    for name, value in _numbers(config):
        if value < 1 and name in (*_DIMENSIONS, *_COUNTS):
            raise ModelRefused(f"config.json: {name} is {value}; it has to be 1 at least")
        if value > _COUNT_MAX and name in (*_COUNTS, "sliding_window"):
            raise ModelRefused(f"config.json: {name} is {str(value)[:40]}; it may be {_COUNT_MAX} at most")


def _refuse_other_names(config: dict[str, Any]) -> None:
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelRefused(f"config.json: architectures is {names!r:.60}; it has to be a list of names")


def _refuse_larger_sizes(config: dict[str, Any], stored_bytes: int) -> None:
    """Refuses a configuration with sizes that no tensor can have: memory would be taken for them."""
    for name, value in _numbers(config):
        if value > _ELEMENTS_A_BYTE * stored_bytes and name in _DIMENSIONS:
            raise ModelRefused(f"config.json: {name} is {value}, and the weights have {stored_bytes} bytes in all")
        if value > _LABELS_MAX and name == "num_labels":
            raise ModelRefused(f"config.json: {name} is {str(value)[:40]}; it may be {_LABELS_MAX} at most")


def _refuse_more_layers(config: dict[str, Any], tensors: int) -> None:
    """Refuses a configuration with more layers than tensors: making the model would take time and memory for each of
    them."""
    for name, value in _numbers(config):
        if _LAYER_COUNT.fullmatch(name) and value > tensors:
            raise ModelRefused(f"config.json: {name} is {value}, and there are {tensors} tensors in all")


def _check_weights(file: Path, expected: set[str]) -> int:
    """The number of tensors that it holds."""
    refuse_unreadable(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            found = set(opened.keys())
    except (SafetensorError, OSError) as error:
        reason = flattened(error)
        raise ModelRefused(f"{file.name}: truncated or not a safetensors file ({reason}); fetch it again") from error
    if missing := sorted(expected - found):
        raise ModelRefused(f"{file.name}: the tensor {missing[0]}, which {_INDEX} places here, is not in it")
    if not found:
        raise ModelRefused(f"{file.name}: it holds no tensors")
    return len(found)


def refuse_unreadable(file: Path) -> None:
    """Raises ModelRefused with the system's reason, which libraries that read weights tell as another one."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise ModelRefused(f"{file.name}: {error.strerror}") from None


def read_small_json(file: Path, kind: type = dict) -> Any:
    """Of a file that may lie in a directory of the checkpoint, where nothing was looked at yet. Raises ModelRefused if
    it is no file, too large, or holds another kind of JSON."""
    name = f"{file.parent.name}/{file.name}"
    try:
        found = file.stat()
    except OSError as error:
        raise ModelRefused(f"{name}: {error.strerror}") from None
    if other := other_than_file(found.st_mode):
        raise ModelRefused(f"{name} is no file, but {other}; take it out of the directory")
    if found.st_size > SMALL_JSON_BYTES_MAX:
        raise ModelRefused(f"{name} has {found.st_size >> 20} MiB, at most {SMALL_JSON_BYTES_MAX >> 20} are read")
    return _read_json(file, name, kind)


def _read_json(file: Path, name: str, kind: type = dict) -> Any:
    """`name` is what a refusal calls the file."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefused(f"{name}: {error.strerror}") from None
    except (RecursionError, ValueError) as error:
        raise ModelRefused(f"{name}: not readable as JSON: {one_line(error)}") from error
    if not isinstance(tree, kind):
        raise ModelRefused(f"{name}: expected a JSON {'list' if kind is list else 'object'}")
    return tree
