"""Registers models in a process of its own, so that loading a checkpoint never holds up serving.

`python -m aegis.models.registrar` reads one `Job` per line from standard input and writes, per job, any number of
`Progress` lines and then one `Registered`, `Waits` or `Refused`, in order; it ends with its input. A caller that has
an engine to compare with calls `main(check)` from a module of its own.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from typing import BinaryIO

import msgspec
from msgspec import Struct

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.failures import one_line, out_of_memory, refused
from aegis.models.registry import Check, register
from aegis.models.sources import Source
from aegis.models.terms import Terms
from aegis.process.child import limit_memory, stand_back

LIBRARIES_BYTES = 64 << 30
"""Of address space, beside what the process has already, until a checkpoint is known: what is imported maps much of it
and uses little, with CUDA above all."""

MEMORY_BYTES = 6 << 30
MEMORY_RATIO = 8
"""Beside what the process has then, for each byte of weights: they are mapped, loaded in a wider type, converted, and
run beside a second engine."""

_NICENESS = 10
"""Those that serve come first."""

_TRACE_CHARACTERS = 8192


class Job(Struct, frozen=True):
    source: Source
    terms: Terms
    renew: bool = False
    looks: bool = False
    base: ModelSpec | None = None  # of an adapter


class Progress(Struct, frozen=True, tag=True):
    """`within_s` it will have got further, or is not waited for any more."""

    model: ModelId
    text: str
    within_s: float


class Registered(Struct, frozen=True, tag=True):
    spec: ModelSpec


class Waits(Struct, frozen=True, tag=True):
    """It can be registered, as far as is known without its weights; there is no image of it yet."""

    model: ModelId


class Refused(Struct, frozen=True, tag=True):
    model: ModelId
    reason: str


Answer = Progress | Registered | Waits | Refused


def main(check: Check | None = None) -> None:
    stand_back(_NICENESS)
    out = _claim_stdout()
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        _write(out, _run(job, check, out))


def _limit_by_weights(stored_bytes: int) -> None:
    limit_memory(MEMORY_BYTES + MEMORY_RATIO * stored_bytes, for_good=False)


def _exhausted() -> str:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    return f"registering it takes more memory than the {limit_bytes / (1 << 30):.0f} GiB that it may have"


def _run(job: Job, check: Check | None, out: BinaryIO) -> Registered | Waits | Refused:
    model, root = job.source.model, job.source.root
    limit_memory(LIBRARIES_BYTES, for_good=False)
    try:
        spec = register(
            job.source,
            job.terms,
            check=check,
            report=lambda text, within_s: _write(out, Progress(model, text, within_s)),
            weigh=_limit_by_weights,
            renew=job.renew,
            looks=job.looks,
            base=job.base,
        )
    except Exception as error:  # noqa: BLE001 - whatever a checkpoint did to a library, the next job is served
        if isinstance(error, UserError) and not out_of_memory(error):
            return Refused(model, error.message)
        return Refused(model, refused(root, _why(error, job)).message)
    return Registered(spec) if spec else Waits(model)


def _why(error: Exception, job: Job) -> str:
    if out_of_memory(error):
        return _exhausted()
    if isinstance(error, OSError):
        return f"its weight image cannot be made in {job.terms.cache_dir}: {error.strerror or error}"
    sys.stderr.write(traceback.format_exc()[-_TRACE_CHARACTERS:])
    return f"{type(error).__name__} while it was registered: {one_line(error)}"


def _write(out: BinaryIO, answer: Answer) -> None:
    """If nobody reads any more, the launcher has ended: then this process ends too, without a message."""
    try:
        out.write(msgspec.json.encode(answer) + b"\n")
        out.flush()
    except BrokenPipeError:
        os._exit(0)


def _claim_stdout() -> BinaryIO:
    """Standard output for answers alone: what libraries print there goes to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


if __name__ == "__main__":
    main()
