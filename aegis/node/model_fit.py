"""Whether a model can be served with the memory and the speed that there are, and if not, why."""

from __future__ import annotations

import math

from aegis.config.sizes import format_size
from aegis.core.clock import NS_PER_MS
from aegis.core.estimators import Hardware, Latency
from aegis.core.model import ModelSpec
from memory.budget import Budget

_MIB = 1 << 20
_GAP_STEPS = 3
"""A stream's own step, and a piece of a prompt beside it, which takes at least two (docs/pieces.md)."""


def misfit(spec: ModelSpec, budget: Budget) -> str:
    """The reason why the model can never be served with these memories; empty if it can."""
    manifest, total = spec.manifest, budget.pages * budget.page_bytes
    least_pages = budget.least_pages(manifest.image_bytes)
    at_least = f"raise --device-memory to {format_size(least_pages * budget.page_bytes)} at least"
    if manifest.image_bytes > total:
        return (
            f"{spec.root}: its weights are {manifest.image_bytes / _MIB:.1f} MiB, a device holds "
            f"{total / _MIB:.0f} MiB; {at_least}"
        )
    if manifest.kv.block_bytes > budget.slab_bytes:
        return (
            f"{spec.root}: a KV block of it is {manifest.kv.block_bytes / _MIB:.1f} MiB, a slab "
            f"{budget.slab_bytes / _MIB:.1f} MiB; raise --slab"
        )
    if least_pages > budget.pages:
        return (
            f"{spec.root}: beside its weights of {manifest.image_bytes / _MIB:.1f} MiB a device of "
            f"{total / _MIB:.0f} MiB has no room for a slab of KV; {at_least}"
        )
    if budget.sequence_tokens(manifest.image_bytes, manifest.kv) <= 0:
        return (
            f"{spec.root}: {budget.host_slabs} slabs of KV in host memory are no more than the other "
            f"{budget.instances - 1} instances keep, one each; raise --host-memory"
        )
    return ""


def too_short_gap(spec: ModelSpec, gap_ns: int, hardware: Hardware) -> str:
    """The reason why no stream of the model could keep such a gap target; empty if one could. By the bound of the
    device, since nothing may have been measured yet."""
    least_ns = _GAP_STEPS * Latency(spec.manifest, hardware).decode_ns(0)
    if gap_ns >= least_ns:
        return ""
    return (
        f"a gap target of {gap_ns / NS_PER_MS:g} ms is too short for '{spec.model}', of which a step takes about "
        f"{least_ns / _GAP_STEPS / NS_PER_MS:.3g} ms here; it can be {math.ceil(least_ns / NS_PER_MS)} ms or more"
    )
