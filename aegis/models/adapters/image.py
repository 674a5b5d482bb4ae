"""An adapter's image: its low-rank pairs, aligned, beside the files of its base that proxies read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from aegis.core.errors import ModelRefused
from aegis.core.model import Adapter, Manifest, ModelSpec, image_name
from aegis.device.image_directory import MANIFEST, read_manifest
from aegis.device.image_file import checksums
from aegis.engine.lean_transformers import import_transformers
from aegis.models.adapters.configuration import CONFIGURATION, AdapterConfiguration, read_configuration, refuse_base
from aegis.models.cache import locked, replacing
from aegis.models.checkpoint import refuse_odd_files, refuse_unreadable
from aegis.models.disk_cache import DiskCache, held, use
from aegis.models.failures import one_line, refused
from aegis.models.place import FETCH_S, LOCK_S, Report
from aegis.models.sources import Source, fetch
from aegis.models.terms import Terms
from aegis.models.text.text_model import TextModel

if TYPE_CHECKING:
    import torch

WEIGHTS = "adapter_model.safetensors"
IMAGE_FORMAT = 2
_PICKLED = "adapter_model.bin"
_STAGE_S = 120.0
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_DTYPES = ("BF16", "F16", "F32")

Shapes = Mapping[str, tuple[int, int]]
"""`(out, in)` of a model's layers that an adapter may change, by path."""

_shapes: dict[str, Shapes] = {}
"""By the image directory: many adapters of one base are registered in a row."""

Pairs = dict[str, dict[str, "torch.Tensor"]]
"""`A` and `B` of each layer that is changed, by its path."""


def register_adapter(source: Source, base: ModelSpec, terms: Terms, *, report: Report, renew: bool) -> ModelSpec:
    """The adapter to be run with `base`. Raises ModelRefused: one line that names its directory and why."""
    try:
        refuse_base(base)
        with held(Path(base.directory)):
            return _registered(source, base, terms, report, renew=renew)
    except ModelRefused as refusal:
        raise refused(source.root, refusal.message) from refusal


def _registered(source: Source, base: ModelSpec, terms: Terms, report: Report, *, renew: bool) -> ModelSpec:
    report("finding the adapter", _STAGE_S)
    found = fetch(source, lambda text: report(text, FETCH_S))
    if not found.is_dir():
        raise ModelRefused("no such directory")
    refuse_odd_files(found)
    configuration = read_configuration(found)
    _refuse_without_weights(found)
    name, cache_dir = _fingerprint(found, base), Path(terms.cache_dir)
    directory = cache_dir / "images" / name
    report("finding the image", LOCK_S)
    with locked(directory):
        manifest = None if renew else read_manifest(directory, name)
        if manifest and not TextModel.is_whole(directory):
            manifest = None
        if manifest is None:
            disk = DiskCache(cache_dir, terms.disk_bytes)
            with disk.room((found / WEIGHTS).stat().st_size, None):
                manifest = _convert(found, configuration, base, directory, report)
            disk.trim([directory])
        use(directory)
    note = f"LoRA adapter of {base.model}, rank {configuration.rank}"
    image = str(directory / image_name())
    return ModelSpec(source.model, manifest, str(directory), image, source.root, base.slo, note, base.model)


def _refuse_without_weights(directory: Path) -> None:
    if (directory / WEIGHTS).is_file():
        return
    if (directory / _PICKLED).exists():
        raise ModelRefused(f"its weights are pickled ({_PICKLED}), which can run any code: convert them to safetensors")
    raise ModelRefused(f"there are no weights: expected {WEIGHTS}")


def _fingerprint(directory: Path, base: ModelSpec) -> str:
    """A name like that of a checkpoint's image, for the adapter beside this image of its base."""
    digest = blake2b(digest_size=16)
    found = (directory / WEIGHTS).stat()
    facts = ("aegis adapter", IMAGE_FORMAT, base.manifest.fingerprint, found.st_size, found.st_ctime_ns)
    digest.update(repr(facts).encode())
    digest.update((directory / CONFIGURATION).read_bytes())
    return digest.hexdigest()


def _convert(
    found: Path, configuration: AdapterConfiguration, base: ModelSpec, directory: Path, report: Report
) -> Manifest:
    import_transformers()
    report("building its base", _STAGE_S)
    if not (Path(base.directory) / MANIFEST).is_file():
        raise ModelRefused(
            f"the image of its base {base.model!r}, beside which it is made, has left the disk: evict {base.model!r}, "
            "ask it for something, which brings it back, and add the adapter then"
        )
    shapes = _shapes.get(base.directory) or _shapes_of(base)
    _shapes[base.directory] = shapes
    report("reading the adapter", _STAGE_S)
    pairs = read_pairs(found / WEIGHTS, shapes, configuration.rank, base.manifest.dtype)
    report("writing the weight image", _STAGE_S)
    with replacing(directory) as draft:
        for file in Path(base.directory).iterdir():
            if file.is_file() and file.name != MANIFEST and file.suffix != ".bin":
                shutil.copyfile(file, draft / file.name)
        return write_pairs(pairs, configuration, base.manifest, directory.name, draft)


def _shapes_of(base: ModelSpec) -> Shapes:
    from transformers import AutoModelForCausalLM

    from aegis.engine.lora import layer_shape
    from aegis.engine.modules import built

    module = built(base, AutoModelForCausalLM, attention="eager")
    last = module.get_output_embeddings()  # sees but the tokens that are asked for
    shapes = {path: layer_shape(part) for path, part in module.named_modules() if part is not last}
    return {path: shape for path, shape in shapes.items() if shape is not None and ".experts." not in path}


def read_pairs(file: Path, shapes: Shapes, rank: int, dtype: str) -> Pairs:
    """Its tensors, once their names and shapes are known to suit the layers of the base; as `dtype`. Raises
    ModelRefused."""
    refuse_unreadable(file)
    try:
        with safe_open(file, framework="pt") as opened:
            names = sorted(opened.keys())
            for name in names:
                part = opened.get_slice(name)
                _check(name, tuple(part.get_shape()), part.get_dtype(), shapes, rank)
            return _paired({name: opened.get_tensor(name) for name in names}, dtype)
    except (SafetensorError, OSError) as error:
        why = f"{file.name}: truncated or not a safetensors file ({one_line(error)}); fetch it again"
        raise ModelRefused(why) from error


def _check(name: str, shape: tuple[int, ...], dtype: str, shapes: Shapes, rank: int) -> None:
    found = _PAIR.fullmatch(name.removeprefix(_PREFIX))
    if found is None:
        raise ModelRefused(f"{WEIGHTS}: {name} is no part of a LoRA pair; only adapters of linear layers are served")
    path = found["path"]
    if path not in shapes:
        raise ModelRefused(f"it changes {path}, and its base has no such layer that could be changed")
    outputs, inputs = shapes[path]
    expected = (rank, inputs) if found["part"] == "A" else (outputs, rank)
    if shape != expected:
        raise ModelRefused(
            f"{WEIGHTS}: {name} is {list(shape)}, and with rank {rank} its base needs {list(expected)}: it belongs to "
            "another base"
        )
    if dtype not in _DTYPES:
        raise ModelRefused(f"{WEIGHTS}: {name} is {dtype}; only {', '.join(_DTYPES)} are read")


def _paired(tensors: Mapping[str, torch.Tensor], dtype: str) -> Pairs:
    from aegis.engine.tensor_views import dtype_named

    pairs: Pairs = {}
    for name, tensor in tensors.items():
        found = _PAIR.fullmatch(name.removeprefix(_PREFIX))
        assert found
        if not tensor.isfinite().all():
            raise ModelRefused(f"{WEIGHTS}: {name} has values that are no numbers")
        made, pair = tensor.to(dtype_named(dtype)), pairs.setdefault(found["path"], {})
        if not made.isfinite().all():
            raise ModelRefused(f"{WEIGHTS}: {name} has values that are too large for {dtype}, in which its base runs")
        if found["part"] in pair:
            raise ModelRefused(f"{WEIGHTS}: of {found['path']} there are two of {found['part']}")
        pair[found["part"]] = made
    if not pairs:
        raise ModelRefused(f"{WEIGHTS}: it holds no tensors")
    if lone := [path for path, pair in pairs.items() if len(pair) < 2]:
        raise ModelRefused(f"{WEIGHTS}: of {lone[0]} there is one of A and B only")
    return pairs


def write_pairs(
    pairs: Pairs, configuration: AdapterConfiguration, base: Manifest, fingerprint: str, draft: Path
) -> Manifest:
    """Writes image and manifest of an adapter of this base into the directory. Each B lies transposed, as engines
    read it."""
    from aegis.engine.stored_tensor import Stored
    from aegis.models.weight_image import write_tensors

    stored = [
        Stored.in_rows((f"{path}.{part}",), tensor, buffer=True)
        for path, pair in sorted(pairs.items())
        for part, tensor in (("A", pair["A"]), ("B", pair["B"].t()))
    ]
    image = draft / image_name()
    entries, nbytes = write_tensors(image, stored)
    manifest = replace(
        base,
        fingerprint=fingerprint,
        image_bytes=nbytes,
        tensors=entries,
        checksums=checksums(str(image)),
        parameters=sum(tensor.content.numel() for tensor in stored),
        quantised=None,
        adapter=Adapter(base.fingerprint, configuration.rank, configuration.scale),
    )
    (draft / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return manifest
