"""Runs decode steps on an engine: the live side of a `DecodeCore`'s turns."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from aegis.core.clock import Clock
from aegis.core.effects import DecodeRow, RunDecode
from aegis.core.events import Stepped
from aegis.core.messages import Tokens
from aegis.core.request import Token
from aegis.engine.block_table import BlockTable, block_table
from aegis.engine.protocol import Engine, Row, engine_at_work


class DecodeWorker:
    """`deliver` sends a step's tokens to the proxy. `interrupted` gives the core its news between two steps, and says
    whether to end."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        deliver: Callable[[list[Tokens]], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._deliver = deliver
        self._interrupted = interrupted

    def run(self, effect: RunDecode) -> Stepped:
        """Runs step after step, until one of the reasons to end that `RunDecode` names.

        Raises EngineFailed; the tokens of earlier steps are delivered then.
        """
        started_ns = now_ns = self._clock.now_ns()
        rows, steps, last = effect.rows, list[tuple[Token, ...]](), False
        tables = [block_table(row.blocks) for row in rows]
        while not last:
            batch = [_row(row, table) for row, table in zip(rows, tables, strict=True)]
            with engine_at_work():
                made = tuple(sampled.token for sampled in self._engine.decode(effect.model, batch))
            steps.append(made)
            messages = [_message(row, token) for row, token in zip(rows, made, strict=True)]
            self._deliver(messages)
            rows = tuple(_next(row, token) for row, token in zip(rows, made, strict=True))
            now_ns = self._clock.now_ns()
            last = any(message.finish for message in messages) or len(steps) == effect.steps
            last = last or now_ns >= effect.until_ns or self._interrupted()
        return Stepped(tuple(steps), now_ns - started_ns)


def _row(row: DecodeRow, table: BlockTable) -> Row:
    return Row(row.job.request, row.token, row.position, table)


def _next(row: DecodeRow, token: Token) -> DecodeRow:
    return replace(row, index=row.index + 1, token=token.id, position=row.position + 1)


def _message(row: DecodeRow, token: Token) -> Tokens:
    job = row.job
    return Tokens(job.request, job.attempt, row.index, (token,), job.finish(row.index, token.id))
