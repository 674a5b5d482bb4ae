"""Modules of models, built by a process before those that run them are forked: building takes most of the time in which
a new instance gets ready. They have no weights; each process binds its own copy to its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from aegis.core.model import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEPT_MAX = 512

_modules: dict[tuple[str, str], PreTrainedModel] = {}  # by directory and fingerprint, the oldest first


def build(encoded: bytes) -> None:
    """Builds the modules of a `ModelSpec` in MessagePack, of the transformers engine. Starts no thread: a process with
    several cannot be forked. Raises ModelRefused."""
    from transformers.utils import logging

    from aegis.engine.transformers_engine import built_for

    spec = msgspec.msgpack.decode(encoded, type=ModelSpec)
    torch.set_num_threads(1)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the instances that are up say it in the server's log
    try:
        _modules[spec.directory, spec.manifest.fingerprint] = built_for(spec)
    finally:
        logging.set_verbosity(verbosity)
    while len(_modules) > _KEPT_MAX:
        del _modules[next(iter(_modules))]


def take(spec: ModelSpec) -> PreTrainedModel | None:
    """The model's modules, once; None if they were not built before."""
    return _modules.pop((spec.directory, spec.manifest.fingerprint), None)
