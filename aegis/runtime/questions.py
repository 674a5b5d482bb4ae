"""What a proxy in another process asks its node's desk, and how both ends write it down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aegis.core.decision import Decision
from aegis.core.ids import ModelId
from aegis.core.model import ModelChange
from aegis.runtime.desk import NodeDesk
from aegis.telemetry.live import Seen
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.node import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span


@dataclass(frozen=True, slots=True)
class Question:
    """`answer` is called with the desk and the arguments, of the types in the tuple. It may raise UserError."""

    arguments: Any
    result: Any
    answer: Callable[..., Awaitable[object]]


async def _add_model(desk: NodeDesk, source: str, name: str | None) -> ModelId:
    return (await desk.add_model(source, name)).spec.model


async def _unload_model(desk: NodeDesk, name: str) -> None:
    await desk.unload_model(name)


async def _change_model(desk: NodeDesk, name: str, change: ModelChange) -> None:
    await desk.change_model(name, change)


async def _limit_memory(desk: NodeDesk, instance: str, nbytes: int, timeout_s: float) -> int:
    return await desk.limit_memory(instance, nbytes, timeout_s=timeout_s)


async def _trim_memory(desk: NodeDesk, instance: str, timeout_s: float) -> int:
    return await desk.trim_memory(instance, timeout_s=timeout_s)


QUESTIONS = {
    "healthy": Question(tuple[()], tuple[bool, str], NodeDesk.healthy),
    "ready": Question(tuple[()], tuple[bool, str], NodeDesk.ready),
    "add_model": Question(tuple[str, str | None], ModelId, _add_model),
    "remove_model": Question(tuple[str], None, NodeDesk.remove_model),
    "unload_model": Question(tuple[str], None, _unload_model),
    "change_model": Question(tuple[str, ModelChange], None, _change_model),
    "metrics": Question(tuple[()], bytes, NodeDesk.metrics),
    "spans": Question(tuple[int], tuple[list[Span], int], NodeDesk.spans),
    "records": Question(tuple[int], tuple[list[Record], int], NodeDesk.records),
    "decisions": Question(tuple[int], tuple[list[Decision], int], NodeDesk.decisions),
    "live": Question(tuple[Seen], bytes, NodeDesk.live),
    "report": Question(tuple[()], NodeReport, NodeDesk.report),
    "memory_report": Question(tuple[()], MemoryReport, NodeDesk.memory_report),
    "limit_memory": Question(tuple[str, int, float], int, _limit_memory),
    "trim_memory": Question(tuple[str, float], int, _trim_memory),
}
"""By the name of the desk's method."""
