"""The queries that a proxy in another process sends to its node, and how both ends encode them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aegis.core.decision import Decision
from aegis.core.ids import ModelId
from aegis.core.model import ModelChange
from aegis.node.queries import NodeQueries
from aegis.telemetry.live_view import SeenUntil
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.registration import Waiting
from aegis.telemetry.spans import Span


@dataclass(frozen=True, slots=True)
class QueryKind:
    """`answer` is called with the node's queries and the arguments, of the tuple's types. It may raise UserError."""

    arguments: Any
    result: Any
    answer: Callable[..., Awaitable[object]]


async def _add_model(
    queries: NodeQueries, source: str, name: str | None, lazy: bool, base: str | None
) -> ModelId | Waiting:
    added = await queries.add_model(source, name, lazy=lazy, base=base)
    return added if isinstance(added, Waiting) else added.spec.model


async def _unload_model(queries: NodeQueries, name: str) -> None:
    await queries.unload_model(name)


async def _change_model(queries: NodeQueries, name: str, change: ModelChange) -> None:
    await queries.change_model(name, change)


async def _limit_memory(queries: NodeQueries, instance: str, nbytes: int, timeout_s: float) -> int:
    return await queries.limit_memory(instance, nbytes, timeout_s=timeout_s)


async def _trim_memory(queries: NodeQueries, instance: str, timeout_s: float) -> int:
    return await queries.trim_memory(instance, timeout_s=timeout_s)


async def _keep_response(queries: NodeQueries, key: str, stored: bytes) -> None:
    await queries.keep_response(key, stored)


async def _find_response(queries: NodeQueries, key: str) -> bytes | None:
    return await queries.find_response(key)


async def _remove_response(queries: NodeQueries, key: str) -> bool:
    return await queries.remove_response(key)


async def _cancel_response(queries: NodeQueries, key: str) -> bytes | None:
    return await queries.cancel_response(key)


QUERIES = {
    "healthy": QueryKind(tuple[()], tuple[bool, str], NodeQueries.healthy),
    "ready": QueryKind(tuple[()], tuple[bool, str], NodeQueries.ready),
    "add_model": QueryKind(tuple[str, str | None, bool, str | None], ModelId | Waiting, _add_model),
    "remove_model": QueryKind(tuple[str], None, NodeQueries.remove_model),
    "unload_model": QueryKind(tuple[str], None, _unload_model),
    "change_model": QueryKind(tuple[str, ModelChange], None, _change_model),
    "metrics": QueryKind(tuple[()], bytes, NodeQueries.metrics),
    "spans": QueryKind(tuple[int], tuple[list[Span], int], NodeQueries.spans),
    "records": QueryKind(tuple[int], tuple[list[Record], int], NodeQueries.records),
    "decisions": QueryKind(tuple[int], tuple[list[Decision], int], NodeQueries.decisions),
    "live": QueryKind(tuple[SeenUntil], bytes, NodeQueries.live),
    "report": QueryKind(tuple[()], NodeReport, NodeQueries.report),
    "memory_report": QueryKind(tuple[()], MemoryReport, NodeQueries.memory_report),
    "limit_memory": QueryKind(tuple[str, int, float], int, _limit_memory),
    "trim_memory": QueryKind(tuple[str, float], int, _trim_memory),
    "keep_response": QueryKind(tuple[str, bytes], None, _keep_response),
    "find_response": QueryKind(tuple[str], bytes | None, _find_response),
    "remove_response": QueryKind(tuple[str], bool, _remove_response),
    "cancel_response": QueryKind(tuple[str], bytes | None, _cancel_response),
}
"""By the name of the method of `ServerQueries`."""
