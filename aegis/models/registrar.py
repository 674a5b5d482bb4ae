"""Registers models in a process of its own, so that loading a checkpoint never holds up serving.

`python -m aegis.models.registrar` reads one `Job` per line from standard input and writes, per job, any number of
`Progress` lines and then one `Registered` or `Refused`, in order; it ends with its input. A caller that has an engine
to compare with calls `main(check)` from a module of its own.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import EngineName, ModelSpec
from aegis.models.registry import Check, register
from aegis.models.sources import Source


class Job(Struct, frozen=True):
    source: Source
    dtype: str
    cache_dir: str
    limit_bytes: int | None = None
    renew: bool = False
    engine: EngineName = "transformers"
    ranks: int = 1


class Progress(Struct, frozen=True, tag=True):
    model: ModelId
    text: str


class Registered(Struct, frozen=True, tag=True):
    spec: ModelSpec


class Refused(Struct, frozen=True, tag=True):
    model: ModelId
    reason: str


Answer = Progress | Registered | Refused


def main(check: Check | None = None) -> None:
    out = _claim_stdout()
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        _write(out, _run(job, check, out))


def _run(job: Job, check: Check | None, out: BinaryIO) -> Registered | Refused:
    model = job.source.model
    try:
        spec = register(
            job.source,
            dtype=job.dtype,
            cache_dir=Path(job.cache_dir),
            limit_bytes=job.limit_bytes,
            check=check,
            report=lambda text: _write(out, Progress(model, text)),
            renew=job.renew,
            engine=job.engine,
            ranks=job.ranks,
        )
    except UserError as refusal:
        return Refused(model, refusal.message)
    except OSError as error:
        why = error.strerror or str(error)
        return Refused(model, f"{job.source.root}: its weight image cannot be made in {job.cache_dir}: {why}")
    except Exception as error:  # noqa: BLE001 - whatever a checkpoint did to a library, the next job is served
        traceback.print_exc()
        return Refused(model, f"{job.source.root}: {type(error).__name__} while it was registered: {error}")
    return Registered(spec)


def _write(out: BinaryIO, answer: Answer) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")
    out.flush()


def _claim_stdout() -> BinaryIO:
    """Standard output for answers alone: what libraries print there goes to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


if __name__ == "__main__":
    main()
