"""The sources that a user names with `--models`: a YAML of models, a checkpoint (its directory, or a GGUF file), a
directory of them, a hub id, or an address elsewhere.

    models:
      my-llama:
        path: checkpoints/llama        # or  hub: org/name, or  url: hf://org/name@revision
        slo: {ttft_ms: 5000, tbt_ms: 50}
        dtype: bfloat16
        weights: int8
        engine: vllm
        lazy: true
      my-adapter:
        path: adapters/sql             # PEFT's format
        base: my-llama

A relative `path` is relative to the YAML file that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from aegis.config.yaml_file import read_mapping
from aegis.core.clock import NS_PER_MS
from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import MODEL_NAME_PATTERN, ModelId
from aegis.core.limits import UNLIMITED, Limits
from aegis.core.model import SLO_NS_MAX, SLO_NS_MIN, EngineName, Pace, Slo, WeightsName
from aegis.models.adapters.configuration import CONFIGURATION, is_adapter
from aegis.models.checkpoint import VOCABULARIES, other_than_file
from aegis.models.failures import one_line
from aegis.models.gguf.checkpoint import SUFFIX, is_gguf
from aegis.models.remote.address import is_remote, name_of
from aegis.models.remote.address import parse as address_of
from aegis.process.error_lines import flattened

_MIB = 1 << 20


def bar(report: Callable[[str], None]) -> type[Any]:
    """A `tqdm_class` that draws nothing and tells `report` of the bytes, a few times a second."""
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]
        """The library makes several; those that count files have nothing to tell."""

        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            """The library's own would be silent where bars are switched off: nothing is drawn here."""
            super(tqdm, self).__init__(*args, **options | {"disable": False})

        def display(self, msg: object = None, pos: object = None) -> None:
            if self.unit == "B" and self.total:
                report(f"downloading, {self.n / _MIB:.0f} of {self.total / _MIB:.0f} MiB")

    return ReportingBar


Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_EXPECTED = "a .yaml or .gguf file, a directory, a hub id or an address"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HUB_VOCABULARIES = ["merges.txt", "vocab.txt", *(f"*{suffix}" for suffix in VOCABULARIES)]
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", *_HUB_VOCABULARIES]
_HUB_DIRECTORIES = ["[!0-9]*/*", "[0-9][!_]*/*", "[0-9]_[!DP]*/*"]  # but 1_Pooling and 2_Dense


class Source(Struct, frozen=True):
    """One model as the user named it, not looked into yet: `path` is absolute, or `hub` is a hub id, or `url` an
    address elsewhere. Of a `lazy` one the weights are read when a request wants them first."""

    model: ModelId
    path: str | None = None
    hub: str | None = None
    slo: Slo = Slo()
    dtype: Dtype | None = None  # None: what the command line says
    pin: bool = False  # its weight image never leaves the model cache
    engine: EngineName | None = None  # likewise
    priority: int = 0
    limits: Limits = UNLIMITED
    url: str | None = None
    lazy: bool = False
    weights: WeightsName | None = None  # likewise
    pace: Pace | None = None  # likewise
    base: str | None = None  # of an adapter: the model that its user names; "": the one that it names itself
    adapter: bool = False

    @property
    def root(self) -> str:
        root = self.path or self.hub or self.url
        assert root is not None
        return root


class _SloEntry(Struct, frozen=True, forbid_unknown_fields=True):
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    gap_ms: float | None = None


class _ModelEntry(Struct, frozen=True, forbid_unknown_fields=True):
    path: str | None = None
    hub: str | None = None
    url: str | None = None
    slo: _SloEntry = _SloEntry()
    dtype: Dtype | None = None
    pin: bool = False
    engine: EngineName | None = None
    lazy: bool = False
    weights: WeightsName | None = None
    pace: Pace | None = None
    base: str | None = None


def read_sources(named: Iterable[str], *, default_slo: Slo = Slo()) -> list[Source]:  # noqa: B008
    """All sources behind these `--models`, in order. Raises UserError, also when two bear the same name."""
    sources: dict[ModelId, Source] = {}
    for name in named:
        for source in _read(name, default_slo):
            if source.model in sources:
                raise UserError(f"{name}: there is already a model named {source.model!r}", param="models")
            sources[source.model] = source
    return list(sources.values())


def fetch(source: Source, report: Callable[[str], None] = lambda _: None) -> Path:
    """The checkpoint's directory; downloads what a hub id names unless it is cached, or HF_HUB_OFFLINE is set, and
    reports how far that is. Raises ModelRefused."""
    if source.path is not None:
        return Path(source.path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                source.root, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DIRECTORIES, tqdm_class=bar(report)
            )
        )
    except LocalEntryNotFoundError as error:
        reason = "it is not in the local hub cache and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set)"
        raise ModelRefused(f"{reason}; name a checkpoint directory instead") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelRefused(f"cannot be downloaded from the hub: {one_line(error)}") from error


def check_name(name: object) -> ModelId:
    """A name that clients may use. Raises UserError."""
    if not isinstance(name, str) or not re.fullmatch(MODEL_NAME_PATTERN, name):
        rule = "use up to 128 ASCII letters, digits and . _ : / @ + -, the first a letter or digit"
        raise UserError(f"{name!r} cannot be a model's name: {rule}", param="name")
    return ModelId(name)


def is_checkpoint(path: Path) -> bool:
    """Whether it looks like one, a directory or a GGUF file; or like an adapter."""
    return is_gguf(path) or (path / "config.json").is_file() or is_adapter(path)


def _read(name: str, default_slo: Slo) -> list[Source]:
    try:
        return _read_one(name, default_slo)
    except (OSError, RuntimeError, ValueError) as error:  # a directory that may not be read, `~nobody`, a NUL byte
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{_shown(name)}: {reason}", param="models") from error


def _read_one(name: str, default_slo: Slo) -> list[Source]:
    if is_remote(name):
        return [Source(_name(name_of(address_of(name)), name), url=name, slo=default_slo)]
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix == SUFFIX:
            return [_at(path.absolute(), name, default_slo)]
        if path.suffix not in (".yaml", ".yml"):
            raise UserError(f"{name}: expected {_EXPECTED}", param="models")
        return _read_yaml(path, default_slo)
    if path.is_dir():
        return [_at(at, name, default_slo) for at in _checkpoints(path)]
    if path.exists():
        other = other_than_file(path.stat().st_mode)
        raise UserError(f"{_shown(name)}: it is no file, but {other}; expected {_EXPECTED}", param="models")
    if _SCHEME.match(name):
        address_of(name)  # refuses it: those that are known went before
    if _HUB_ID.fullmatch(name) and path.suffix not in (".yaml", ".yml", SUFFIX):
        return [Source(_name(name, name), hub=name, slo=default_slo)]
    raise UserError(f"{_shown(name)}: no such file or directory", param="models")


def _at(path: Path, named: str, default_slo: Slo) -> Source:
    name = path.stem if os.access(path, os.F_OK) and is_gguf(path) else path.name
    model = _name(name, named, "; rename it, or name it in a YAML file of models")
    return Source(model, path=str(path), slo=default_slo, adapter=_is_seen_adapter(path))


def _is_seen_adapter(path: Path) -> bool:
    """A directory that may not be looked into is taken for a checkpoint, and refused alone when it is registered."""
    try:
        return is_adapter(path)
    except PermissionError:
        return False


def _may_be_one(path: Path) -> bool:
    """Whether it is a checkpoint, or a directory that may not be looked into: that is refused when it is registered, so
    that the others are served, as beside the `lost+found` of a disk."""
    try:
        return is_checkpoint(path)
    except PermissionError:
        return re.fullmatch(MODEL_NAME_PATTERN, path.name) is not None


def _checkpoints(directory: Path) -> list[Path]:
    directory = directory.resolve()
    if is_checkpoint(directory):
        return [directory]
    found = sorted(entry for entry in directory.iterdir() if _may_be_one(entry))
    if not found:
        _refuse_odd(each for each in [directory, *sorted(directory.iterdir())] if os.access(each, os.X_OK))
        raise UserError(
            f"{directory}: neither it nor any directory in it holds a config.json, and it holds no .gguf file",
            param="models",
        )
    return found


def _refuse_odd(directories: Iterable[Path]) -> None:
    """Refuses the first of them that would be a checkpoint, or an adapter, if its configuration were a file."""
    for directory in directories:
        for name in ("config.json", CONFIGURATION):
            if (directory / name).exists() and (other := other_than_file((directory / name).stat().st_mode)):
                reason = f"{name} is no file, but {other}; put that of a checkpoint in its place"
                raise UserError(f"{directory}: {reason}", param="models")


def _read_yaml(path: Path, default_slo: Slo) -> list[Source]:
    tree = read_mapping(path)
    if not isinstance(tree.get("models"), dict) or not tree["models"]:
        raise UserError(f"{path}: expected a `models:` map from names to checkpoints", param="models")
    if unknown := [key for key in tree if key != "models"]:
        raise UserError(f"{path}: unknown key {unknown[0]!r}; the only one is 'models'", param="models")
    return [_from_entry(path, name, entry, default_slo) for name, entry in tree["models"].items()]


def _from_entry(path: Path, name: object, entry: object, default_slo: Slo) -> Source:
    where = f"{path}: models.{name}"
    model = _name(name, str(path))
    try:
        read = msgspec.convert(entry, _ModelEntry)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {flattened(error)}", param="models") from error
    if sum(place is not None for place in (read.path, read.hub, read.url)) != 1:
        raise UserError(f"{where}: give one of 'path', 'hub' and 'url'", param="models")
    slo = _slo(where, read.slo, default_slo)
    source = Source(
        model,
        None,
        read.hub,
        slo,
        read.dtype,
        read.pin,
        read.engine,
        url=read.url,
        lazy=read.lazy,
        weights=read.weights,
        pace=read.pace,
        base=read.base,
    )
    if read.url is not None:
        address_of(read.url)
    own_slo = read.slo != _SloEntry()
    if read.path is None:
        return adapter_terms(where, source, own_slo=own_slo)
    named = path.parent / Path(read.path).expanduser()
    found = named.absolute() if is_gguf(named) else named.resolve()  # what a link leads to may have another name
    if not found.is_dir() and not is_gguf(found):
        reason = "no such directory or .gguf file"
        if found.exists():
            reason = f"expected a directory or a .gguf file, not {other_than_file(found.stat().st_mode) or 'a file'}"
        raise UserError(f"{where}: {reason}: {found}", param="models")
    return adapter_terms(where, replace(source, path=str(found)), own_slo=own_slo)


def adapter_terms(where: str, source: Source, *, own_slo: bool = False) -> Source:
    """The source, known to be an adapter's or not, by its path or the base that is named. Raises UserError for terms
    that an adapter cannot have: it runs in the steps of its base."""
    adapter = source.base is not None or (source.path is not None and _is_seen_adapter(Path(source.path)))
    if not adapter:
        return source
    terms = {
        "url": source.url,
        "dtype": source.dtype,
        "weights": source.weights,
        "engine": source.engine,
        "lazy": source.lazy,
        "slo": own_slo,
    }
    if given := [term for term, value in terms.items() if value]:
        raise UserError(f"{where}: an adapter has no '{given[0]}' of its own; it is run with its base", param="models")
    return replace(source, adapter=True)


def _slo(where: str, entry: _SloEntry, default: Slo) -> Slo:
    for key, value in (("ttft_ms", entry.ttft_ms), ("tbt_ms", entry.tbt_ms), ("gap_ms", entry.gap_ms)):
        if value is not None and not SLO_NS_MIN <= value * NS_PER_MS <= SLO_NS_MAX:
            limits = f"{SLO_NS_MIN / NS_PER_MS} to {SLO_NS_MAX // NS_PER_MS}"
            raise UserError(f"{where}.slo.{key}: expected {limits} milliseconds, got {value}", param="models")
    return Slo(
        ttft_ns=default.ttft_ns if entry.ttft_ms is None else round(entry.ttft_ms * NS_PER_MS),
        tbt_ns=default.tbt_ns if entry.tbt_ms is None else round(entry.tbt_ms * NS_PER_MS),
        gap_ns=default.gap_ns if entry.gap_ms is None else round(entry.gap_ms * NS_PER_MS),
    )


def _name(name: object, where: str, remedy: str = "") -> ModelId:
    try:
        return check_name(name)
    except UserError as error:
        raise UserError(f"{where}: {error.message}{remedy}", param="models") from None


def _shown(name: str) -> str:
    return (name if name.isprintable() else repr(name))[:300]
