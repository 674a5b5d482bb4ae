"""Registration of a model: from a user's source to a `ModelSpec` that any instance can bind.

A checkpoint is converted once; afterwards its image is found by fingerprint in milliseconds and without torch. An image
appears in the cache whole or not at all, and only after the model has been checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from aegis.core.errors import ModelRefused, UserError
from aegis.core.model import EngineName, Manifest, ModelSpec, Pooling, WeightsName, image_name
from aegis.device.image_directory import CONFIG, TOKENIZER, read_manifest
from aegis.engine.lean_transformers import import_transformers
from aegis.engine.vllm import version
from aegis.models.cache import locked, replacing
from aegis.models.checkpoint import Checkpoint, open_checkpoint
from aegis.models.disk_cache import DiskCache, held, use
from aegis.models.failures import refused
from aegis.models.fingerprint import fingerprint
from aegis.models.gguf.checkpoint import write_config_files
from aegis.models.place import FETCH_S, LOCK_S, Looked, Place, Report
from aegis.models.pooling_files import longest_text, pools
from aegis.models.quantised.configuration import comes_quantised, scheme_of, without_scheme
from aegis.models.sources import Source, fetch
from aegis.models.terms import Terms
from aegis.models.text.detokenizer import read_detokenizer, write_detokenizer
from aegis.models.text.text_model import TextModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aegis.models.loading import Loaded

TEMPLATE_CHARACTERS_MAX = 1 << 20
_MESSAGES = [{"role": "user", "content": "Hello"}]


def try_chat_template(text: TextModel) -> None:
    """Checks that the chat template can be used at all, if there is one, before its model is served: renders a
    conversation as serving does. Raises ModelRefused if it is no template. A template that objects to this conversation
    may accept others: many want certain roles, or tools. Refuses one that is very long, because proxies look through it
    for each conversation."""
    from jinja2 import TemplateSyntaxError

    if len(text.chat_template or "") > TEMPLATE_CHARACTERS_MAX:
        raise ModelRefused(
            f"its chat template has {len(text.chat_template or '')} characters, at most {TEMPLATE_CHARACTERS_MAX} are "
            "accepted"
        )
    try:
        text.render_chat(_MESSAGES)
    except UserError as refusal:
        if isinstance(error := refusal.__cause__, TemplateSyntaxError):
            raise ModelRefused(f"its chat template, line {error.lineno}: {error.message}") from error
    except (MemoryError, RecursionError) as error:
        raise ModelRefused(f"its chat template cannot be rendered ({type(error).__name__})") from None
    except Exception:  # noqa: BLE001 - what it objects to is this conversation
        return


Check = Callable[[ModelSpec, "PreTrainedModel"], None]
"""Compares the image, served by an engine, with the model as transformers runs it. Raises ModelRefused."""

STAGE_S = 120.0
BYTES_PER_S = 16 << 20
"""The least speed of reading weights: slow disks have less than a tenth of the speed of others."""

TEMPLATE_S = 5.0


def register(
    source: Source,
    terms: Terms,
    *,
    check: Check | None = None,
    report: Report = lambda _text, _within_s: None,
    weigh: Callable[[int], None] = lambda _nbytes: None,
    renew: bool = False,
    looks: bool = False,
    base: ModelSpec | None = None,
) -> ModelSpec | None:
    """`weigh` is told the bytes of the checkpoint's weights before anything of it but its configuration is read, and
    after everything is imported. With `renew` an image that is there already is made again. If it only `looks`, None is
    returned where there is no image yet. With a `base` the source is an adapter of it. Raises ModelRefused: one line
    that names the checkpoint and why."""
    if base is not None:
        from aegis.models.adapters.image import register_adapter

        return register_adapter(source, base, terms, report=report, renew=renew)
    try:
        report("finding the checkpoint", STAGE_S)
        place = _place_of(source, Path(terms.cache_dir), report)
        looked = place.look()
        terms = _own_terms(source, looked.checkpoint, terms)
        _refuse_too_large(looked.weights_bytes, terms)
        _refuse_for_vllm(terms, looked.checkpoint)
        _refuse_quantised(terms)
        image = _image(looked, terms)
        renew = renew or (image is not None and not TextModel.is_whole(image))
        if renew or image is None:
            if looks:
                return None
            disk = DiskCache(Path(terms.cache_dir), terms.disk_bytes)
            with disk.room(_image_bytes(looked) + looked.missing_bytes, place.entry), held(place.entry):
                spec = _register(source, place.fetch(), terms, check, report, weigh, renew)
            disk.trim([Path(spec.directory)])
            return spec
        return _register(source, looked, terms, check, report, weigh, renew)
    except ModelRefused as refusal:
        raise refused(source.root, refusal.message) from refusal


def _own_terms(source: Source, checkpoint: Checkpoint, terms: Terms) -> Terms:
    """The terms that hold for this source."""
    dtype, engine = source.dtype or terms.dtype, source.engine or terms.engine
    weights = source.weights or terms.weights
    if pools(checkpoint):
        engine, weights = _engine_that_pools(terms.ranks), "dense"
    packable = weights != "dense" or checkpoint.comes_quantised or _may_be_bfloat16(checkpoint, dtype)
    packs = terms.packs and terms.ranks == 1 and packable
    return replace(terms, dtype=dtype, engine=engine, weights=weights, packs=packs)


def _refuse_too_large(stored: int, terms: Terms) -> None:
    """Refuses only sure cases: stored in half the bytes, or with tied weights stored twice, the model might still fit;
    so might it where numbers of 32 bits become integers of 8 or 4."""
    times = {"dense": 2, "int8": 4}.get(terms.weights, 8)
    limit_bytes = terms.limit_bytes and terms.limit_bytes * terms.ranks
    if limit_bytes is not None and stored > times * limit_bytes:
        raise ModelRefused(
            f"its weights are {stored / (1 << 20):.0f} MiB, a device holds {limit_bytes / (1 << 20):.0f} MiB; "
            "raise --device-memory"
        )


def _image_bytes(looked: Looked) -> int:
    """The bytes of the image at most, but for integers that cannot stay what they are."""
    scheme = scheme_of(looked.checkpoint.config)
    return looked.weights_bytes * (scheme.growth if scheme and not scheme.bits else 1)


def _may_be_bfloat16(checkpoint: Checkpoint, dtype: str) -> bool:
    """Whether anything of it could be packed; else its image is the same for all processors."""
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return (own if dtype == "auto" else dtype) not in ("float32", "float16")


def _engine_that_pools(ranks: int) -> EngineName:
    """Whichever one the others use."""
    if ranks > 1:
        raise ModelRefused("models of embeddings are not shared out among ranks: leave out --tensor-parallel-size")
    return "transformers"


def _refuse_for_vllm(terms: Terms, checkpoint: Checkpoint) -> None:
    if terms.engine != "vllm":
        return
    if checkpoint.gguf:
        raise ModelRefused("the vLLM engine does not run GGUF files; the transformers engine does")
    if method := checkpoint.quantised_by:
        raise ModelRefused(
            f"vLLM has {method} weights in memory of its own once loaded, which no switch could fill: use the "
            "transformers engine for it, or a checkpoint that is not quantised"
        )
    if terms.ranks > 1:
        raise ModelRefused(
            "the vLLM engine cannot share a model out among ranks yet: leave out --tensor-parallel-size, or use the "
            "transformers engine for it"
        )
    if reason := version.refusal():
        raise ModelRefused(reason)


def _refuse_quantised(terms: Terms) -> None:
    if terms.weights == "dense":
        return
    if terms.engine != "transformers":
        raise ModelRefused(
            f"the {terms.engine} engine runs no weights that were made {terms.weights} here: leave out --weights, or "
            "use the transformers engine for it"
        )
    if terms.ranks > 1:
        raise ModelRefused(
            f"weights that were made {terms.weights} cannot be shared out among ranks yet: leave out --weights, or "
            "--tensor-parallel-size"
        )


def _image(looked: Looked, terms: Terms) -> Path | None:
    """The directory of its image, if there is one."""
    if looked.fetched and not looked.digests:
        return None  # nobody knows yet what its weights are
    name, directory = _image_place(looked, terms)
    return directory if read_manifest(directory, name) else None


def _image_place(looked: Looked, terms: Terms) -> tuple[str, Path]:
    """The name and the directory of the image."""
    name = fingerprint(
        looked.checkpoint,
        terms.dtype,
        terms.engine,
        terms.ranks,
        packs=terms.packs,
        weights=terms.weights,
        digests=looked.digests,
    )
    return name, Path(terms.cache_dir) / "images" / name


def _register(
    source: Source,
    looked: Looked,
    terms: Terms,
    check: Check | None,
    report: Report,
    weigh: Callable[[int], None],
    renew: bool,
) -> ModelSpec:
    name, directory = _image_place(looked, terms)
    report("finding the image", LOCK_S)  # another process may be making it
    with locked(directory):
        manifest = None if renew else read_manifest(directory, name)
        if manifest is None:
            manifest = _convert(source, looked.checkpoint, terms, directory, check, report, weigh)
        elif (directory / TOKENIZER).is_file() and read_detokenizer(directory) is None:
            report("reading the tokenizer", STAGE_S)  # of an image that an earlier version made
            write_detokenizer(directory)
        use(directory)
    return _spec(source, looked.checkpoint, manifest, directory)


def _convert(
    source: Source,
    checkpoint: Checkpoint,
    terms: Terms,
    directory: Path,
    check: Check | None,
    report: Report,
    weigh: Callable[[int], None],
) -> Manifest:
    import_transformers()
    from aegis.models.gguf.tokenizer import write_tokenizer_files
    from aegis.models.loading import load, refuse_by_configuration
    from aegis.models.text.tokenizer_files import write_tokenizer

    if terms.engine == "vllm":
        import aegis.models.vllm_weight_image  # noqa: F401 - whose libraries are not the checkpoint's doing

    nbytes = checkpoint.loaded_bytes
    within_s = STAGE_S + nbytes / BYTES_PER_S
    weigh(nbytes)
    report("reading the configuration", STAGE_S)
    with replacing(directory) as draft:
        if checkpoint.gguf:  # what other checkpoints have beside their weights is made of it
            checkpoint = replace(checkpoint, directory=draft)
            write_config_files(checkpoint.config, draft)
        pooling = refuse_by_configuration(checkpoint)
        report("reading the tokenizer", STAGE_S)
        note = write_tokenizer_files(checkpoint.gguf, draft) if checkpoint.gguf else None
        if note := note or write_tokenizer(checkpoint.directory, draft):
            report(f"{note}: only token ids can be sent", STAGE_S)
        text = TextModel.load(draft)
        if text:
            report("trying the chat template", TEMPLATE_S)
            try_chat_template(text)
        report("loading the weights", within_s)
        loaded = load(checkpoint, terms.dtype, pooling, keeps=terms.ranks == 1 and pooling is None)
        model = loaded.model
        write = _writer(terms, loaded, checkpoint, pooling)
        if terms.weights != "dense":
            report(f"making its weights {terms.weights}", within_s)
            write, told = _quantising(write, loaded, terms.weights, text)
            report(told, within_s)
        report("writing the weight image", within_s)
        manifest = write(directory.name, checkpoint.directory, draft)
        if comes_quantised(checkpoint.config):
            (draft / CONFIG).write_text(json.dumps(without_scheme(checkpoint.config)), encoding="utf-8")
        if check is not None:
            report("comparing its output with transformers'", within_s)
            check(_spec(source, checkpoint, manifest, draft), model)
    return manifest


def _quantising(
    write: Callable[..., Manifest], loaded: Loaded, weights: WeightsName, text: TextModel | None
) -> tuple[Callable[..., Manifest], str]:
    """The writer of the quantised image, and a line on its cost. The model has quantised weights from then on."""
    from aegis.models.quantising import quantise_layers

    layers = quantise_layers(loaded.model, weights, text, loaded.integers)
    if layers.told is None:
        return write, "it comes in as few bits"
    return partial(write, integers=layers.integers, quantised=layers.told, came=loaded.came), layers.told.told


def _writer(terms: Terms, loaded: Loaded, checkpoint: Checkpoint, pooling: Pooling | None) -> Callable[..., Manifest]:
    """The writer of the image that its engine binds: it gets the fingerprint, the checkpoint and the directory."""
    model = loaded.model
    if pooling is not None:
        from aegis.models.kv_probe import positions
        from aegis.models.weight_image import Pooled, write_pooled_image

        pooled = Pooled(pooling, longest_text(checkpoint, positions(model)))
        return partial(write_pooled_image, model, pooled, packs=terms.packs, came=loaded.note)
    if terms.engine == "vllm":
        from aegis.models.vllm_weight_image import write_vllm_image

        return partial(write_vllm_image, model)
    from aegis.models.kv_probe import probe
    from aegis.models.weight_image import write_image

    write = partial(write_image, model, probe(model), ranks=terms.ranks, packs=terms.packs)
    return partial(write, integers=loaded.integers, came=loaded.note)


def _spec(source: Source, checkpoint: Checkpoint, manifest: Manifest, directory: Path) -> ModelSpec:
    return ModelSpec(
        model=source.model,
        manifest=manifest,
        directory=str(directory),
        image_path=str(directory / image_name()),
        root=source.root,
        slo=source.slo,
        note=manifest.came,
    )


class _Directory:
    """A directory of this machine, of the user or of the hub's own cache."""

    entry = None

    def __init__(self, source: Source, report: Report) -> None:
        self._source = source
        self._report = report

    def look(self) -> Looked:
        checkpoint = open_checkpoint(fetch(self._source, lambda text: self._report(text, FETCH_S)))
        return Looked(checkpoint, checkpoint.stored_bytes)

    fetch = look


def _place_of(source: Source, cache_dir: Path, report: Report) -> Place:
    """The hub's own cache is filled as a whole, so a lazy model of the hub does without it."""
    url = source.url or (f"hf://{source.hub}" if source.hub and source.lazy else None)
    if url is None:
        return _Directory(source, report)
    from aegis.models.remote.checkpoint import RemoteCheckpoint

    return RemoteCheckpoint(url, cache_dir, report)
