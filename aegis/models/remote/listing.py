"""What a source has, and what of it a checkpoint needs: never code, never pickled weights, never a way out of its
directory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from aegis.core.errors import ModelRefused
from aegis.models.checkpoint import JSON_BYTES_MAX, TEMPLATES, TOKENIZER_BYTES_MAX, VOCABULARIES

FILES_MAX = 10_000
SIZE_MAX = 1 << 53
SMALL_BYTES_MAX = 1 << 30
"""Of all files beside the weights together, which are fetched before any limit of the cache is asked."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SUMS = "SHA256SUMS"
"""Many folders have one: a line for each file, its sha256 and its name."""

_GGUF = ".gguf"
_SHOWN = 5
_TEXT = (".json", ".jinja")
_WORD_LISTS = ("merges.txt", "vocab.txt")
_LARGE = ("tokenizer.json", "vocab.json", *_WORD_LISTS)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MODULE = re.compile(r"\d+_\w+", re.ASCII)
"""Directories in which sentence-transformers has the parts of a model."""


class RemoteFile(Struct, frozen=True):
    """`tag` is another one where the file's content is; None if the source does not tell. The file is the part of what
    is at `url` from `offset` on, or all of it where that is None."""

    name: str
    url: str
    size_bytes: int | None = None
    sha256: str | None = None
    tag: str | None = None
    offset: int | None = None
    headers: dict[str, str] = {}


class Listing(Struct, frozen=True):
    """`revision` is what the source calls this state of it, if it does."""

    files: tuple[RemoteFile, ...]
    revision: str = ""

    def named(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


def as_size(told: Any) -> int | None:
    """What a source says of a file's bytes; None for what cannot be, as where it says nothing."""
    return told if type(told) is int and 0 <= told < SIZE_MAX else None


def refuse_climbing(names: Iterable[str]) -> None:
    """Raises ModelRefused for a name that is none of a file within the source."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable() or len(name) > 255:
            raise ModelRefused(f"it lists {name[:100]!r}, which is no file in its directory")


def beside_weights(listing: Listing) -> list[RemoteFile]:
    """Configuration, tokenizer and templates. Raises ModelRefused where one is too large, or all together are, or there
    is no configuration."""
    refuse_climbing(file.name for file in listing.files)
    found = [file for file in listing.files if is_beside_weights(file.name)]
    for file in found:
        most = small_bytes_max(file.name)
        if file.size_bytes is not None and file.size_bytes > most:
            raise ModelRefused(f"{file.name} has {file.size_bytes >> 20} MiB, at most {most >> 20} are read")
    refuse_too_many_small(sum(file.size_bytes or 0 for file in found))
    if listing.named(CONFIG) is None:
        ggufs = sorted(file.name for file in listing.files if file.name.endswith(_GGUF))
        hint = f"; it has GGUF files, of which an address may name one, as …/{ggufs[0]}" if ggufs else ""
        raise ModelRefused(f"there is no {CONFIG}, so it is not a checkpoint{hint}")
    return found


def refuse_too_many_small(nbytes: int) -> None:
    """Raises ModelRefused where the files beside the weights have more than may be fetched of them."""
    if nbytes > SMALL_BYTES_MAX:
        raise ModelRefused(f"the files beside its weights have more than {SMALL_BYTES_MAX >> 20} MiB together")


def small_bytes_max(name: str) -> int:
    path = PurePosixPath(name)
    return TOKENIZER_BYTES_MAX if path.name in _LARGE or path.suffix in VOCABULARIES else JSON_BYTES_MAX


def weights(listing: Listing, index: Any) -> list[RemoteFile]:
    """The safetensors files that are read, `index` being the content of the index if there is one. Raises
    ModelRefused."""
    parts = [file for file in listing.files if _is_module_weights(PurePosixPath(file.name))]
    if single := listing.named(SINGLE):
        return [single, *parts]
    if index is None:
        raise ModelRefused(_why_no_weights([file.name for file in listing.files]))
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not named:
        raise ModelRefused(f"{INDEX}: it has no weight_map")
    shards = sorted({str(shard) for shard in named.values()})
    found = []
    for shard in shards:
        if PurePosixPath(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelRefused(f"{INDEX}: {shard[:100]!r} is not the name of a safetensors file beside it")
        if (file := listing.named(shard)) is None:
            raise ModelRefused(f"the shard {shard}, named in {INDEX}, is missing")
        found.append(file)
    return [*found, *parts]


def gguf_in(listing: Listing, name: str) -> RemoteFile:
    """The file that an address names, by its own name alone. Raises ModelRefused."""
    refuse_climbing([name])
    found = listing.named(name)
    if found is None:
        others = sorted(file.name for file in listing.files if file.name.endswith(_GGUF))
        known = f"; it has {', '.join(others[:_SHOWN])}" + (", …" if len(others) > _SHOWN else "") if others else ""
        raise ModelRefused(f"there is no file {name}{known}")
    return replace(found, name=PurePosixPath(name).name)


def read_sums(text: str) -> dict[str, str]:
    """Names and digests of a file as `sha256sum` writes it; lines of another form say nothing."""
    lines = (re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(\S.*)", line.strip()) for line in text.splitlines())
    return {found[2]: found[1].lower() for found in lines if found}


def is_beside_weights(name: str) -> bool:
    path = PurePosixPath(name)
    if path.name.startswith("."):
        return False
    text = path.suffix in (*_TEXT, *VOCABULARIES) or path.name in _WORD_LISTS
    match path.parts:
        case (_,):
            return text
        case (directory, _):
            templates = directory == TEMPLATES and path.suffix == ".jinja"
            return templates or (text and _MODULE.fullmatch(directory) is not None)
    return False


def _is_module_weights(path: PurePosixPath) -> bool:
    return len(path.parts) == 2 and _MODULE.fullmatch(path.parts[0]) is not None and path.name == SINGLE


def _why_no_weights(names: Collection[str]) -> str:
    pickled = sorted(name for name in names if PurePosixPath(name).suffix in _PICKLED and "/" not in name)
    if pickled:
        return f"its weights are pickled ({pickled[0]}), which can run any code: convert them to safetensors"
    return f"there are no weights: expected {SINGLE} or {INDEX}"
