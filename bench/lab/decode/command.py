"""The options of `aegis lab decode`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from aegis.core.errors import UserError
from aegis.core.model import EngineName


def run(*, json_path: Path | None, engines: Sequence[str], peer: str, threads: int) -> None:
    """Raises UserError."""
    names = get_args(EngineName)
    if peer not in names:
        raise UserError(f"--peer {peer}: expected {' or '.join(names)}", param="peer")
    if unknown := [name for name in engines if name not in names]:
        raise UserError(f"--engine {unknown[0]}: expected {' or '.join(names)}, or both", param="engine")
    known = msgspec.convert(tuple(engines), tuple[EngineName, ...])
    if peer == "vllm":
        from bench.lab.decode.beside_vllm import Plan
        from bench.lab.decode.beside_vllm import run as beside_vllm

        beside_vllm(json_path, Plan(engines=known, threads=threads))
        return
    if known != ("transformers",):
        raise UserError("beside transformers only --engine transformers is measured; add --peer vllm", param="engine")
    from bench.lab.decode.beside_transformers import Plan as DecodePlan
    from bench.lab.decode.beside_transformers import run as beside_transformers

    beside_transformers(json_path, DecodePlan(threads=threads))
