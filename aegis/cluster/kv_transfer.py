"""KV from host slabs of one machine to those of another: ordered here, brought by their transfer actors."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from aegis.cluster.remote_machine import MachineLost, RemoteMachine, region
from aegis.cluster.transfer_actor import TransferFailed, TransferRequest, outcome, transfer
from aegis.core.block_runs import paired
from aegis.core.messages import FetchKv
from aegis.device.block_copies import block_copies

_ANSWERS_WITHIN_S = 2.0
_GONE = "the machine that has its KV is lost"


async def transfer_kv(wanted: FetchKv, source: RemoteMachine, target: RemoteMachine, *, slab_bytes: int) -> str:
    """The reason why it did not come; empty if it did."""
    try:
        if not await source.has_copied(wanted.kv.ready):
            return f"its KV has not left the device on {source.id}"
    except MachineLost:
        return _GONE
    try:
        why = await _reach(source, target) or await _bring(wanted, source, target, slab_bytes)
    except MachineLost:
        return f"{target.id} is lost"
    if why in ("lost", "silent") and not await _carries(source):
        return _GONE
    return why and f"its KV did not come from {source.id} ({why})"


async def _reach(source: RemoteMachine, target: RemoteMachine) -> str:
    """Makes host KV of all ranks of the source known at the target, once for both machines."""
    async with target.reaching:
        if source.id in target.reached:
            return ""
        for rank in range(len(target.memory)):
            reach = partial(
                target.transfer_actor.reach.remote, _name(source, rank), source.transfer_actor, region(rank)
            )
            why: str = await target.answer(reach)
            if why:
                return why
        target.reached.add(source.id)
    return ""


async def _bring(wanted: FetchKv, source: RemoteMachine, target: RemoteMachine, slab_bytes: int) -> str:
    blocks = paired(wanted.kv.blocks, wanted.blocks)
    copies = tuple(block_copies(blocks, slab_bytes=slab_bytes, block_bytes=wanted.block_bytes, source=0, target=0))
    for rank in range(len(target.memory)):
        order = TransferRequest(_name(source, rank), region(rank), copies)
        brought = outcome(await target.answer(partial(transfer, target.transfer_actor, order)))
        if isinstance(brought, TransferFailed):
            return brought.why
    return ""


async def _carries(source: RemoteMachine) -> bool:
    """A transfer actor that is gone takes its machine with it, because nothing could ever be fetched from there."""
    with suppress(MachineLost, TimeoutError):
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            await source.answer(source.transfer_actor.__ray_ready__.remote)
    return not source.lost


def _name(source: RemoteMachine, rank: int) -> str:
    return f"{source.id}/{rank}"
