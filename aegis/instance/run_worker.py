"""Runs what an instance core asks for on an engine: steps of rows of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from aegis.core.clock import Clock
from aegis.core.effects import Row, Run
from aegis.core.events import Stepped
from aegis.core.ids import ModelId
from aegis.core.messages import Broken, Tokens
from aegis.core.request import SLOW, Token
from aegis.engine.block_table import BlockTable, block_table
from aegis.engine.protocol import Engine, Sampled, StepRow, engine_at_work

Delivered = Tokens | Broken


class BegunRun(NamedTuple):
    """A run with block tables of its own for each row: the core's change while it runs."""

    run: Run
    tables: list[BlockTable]


class RunWorker:
    """`deliver` sends a step's tokens to the proxy, and what it broke: the proxy cancels those requests, and until then
    they take part in steps like others. `interrupted` gives the core its news between two steps, and says
    whether to end."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        deliver: Callable[[list[Delivered]], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._deliver = deliver
        self._interrupted = interrupted

    def run(self, run: Run) -> Stepped:
        """Runs step after step, until one of the reasons to end that `Run` names.

        Raises EngineFailed; the tokens of earlier steps are delivered then.
        """
        return self.steps(self.begin(run))

    def begin(self, run: Run) -> BegunRun:
        """Reads what is the core's, and starts the requests of prompts at their first rows. From the core's thread.
        Raises EngineFailed."""
        with engine_at_work():
            for row in run.rows:
                if row.start == 0:
                    job = row.job
                    self._engine.start(run.model, job.request, job.prompt, job.sent, job.sampling)
        return BegunRun(run, [block_table(row.blocks) for row in run.rows])

    def steps(self, begun: BegunRun) -> Stepped:
        """The steps of a run that has begun; from any thread. Raises EngineFailed, as `run`."""
        started_ns = now_ns = self._clock.now_ns()
        run, tables = begun
        rows = run.rows
        steps, prompt, last = list[tuple[Token, ...]](), tuple[Token, ...](), False
        while not last:
            with engine_at_work():
                made = self._step(run.model, rows, tables)
            tokens = tuple([sampled.token for sampled in made if sampled is not None])
            if tokens:
                steps.append(tokens)
            sampled = [(row, each) for row, each in zip(rows, made, strict=True) if each]
            messages = [_message(row, each) for row, each in sampled if row.decodes or each.problem]
            if messages:
                self._deliver(messages)
            ends = any([isinstance(message, Broken) or message.finish for message in messages])
            rows = tuple([_next(row, each.token) for row, each in sampled if row.decodes])
            last = ends or len(rows) < len(made) or len(steps) == run.steps
            now_ns = self._clock.now_ns()
            last = last or now_ns >= run.until_ns or self._interrupted()
            prompt = made[0].prompt if made[0] else ()
        nothing_ran = not any([self._runs(run.model, row) for row in run.rows])
        return Stepped(tuple(steps), 0 if nothing_ran else now_ns - started_ns, prompt, run.lane)

    def _step(self, model: ModelId, rows: Sequence[Row], tables: Sequence[BlockTable]) -> list[Sampled | None]:
        if self._engine.extends(model):
            return self._engine.step(model, [_step_row(row, table) for row, table in zip(rows, tables, strict=True)])
        return self._step_apart(model, rows, tables)

    def _step_apart(self, model: ModelId, rows: Sequence[Row], tables: Sequence[BlockTable]) -> list[Sampled | None]:
        """Prompts one by one and whole, in place of their last pieces; the rows that decode together."""
        made: list[Sampled | None] = [None] * len(rows)
        for at, row in enumerate(rows):
            if not row.decodes and self._runs(model, row):
                (made[at],) = self._engine.step(model, [_step_row(replace(row, start=0), tables[at])])
        decoding = [at for at, row in enumerate(rows) if row.decodes]
        if decoding:
            sampled = self._engine.step(model, [_step_row(rows[at], tables[at]) for at in decoding])
            for at, each in zip(decoding, sampled, strict=True):
                made[at] = each
        return made

    def _runs(self, model: ModelId, row: Row) -> bool:
        """Not if the last piece of its prompt will run it as well."""
        return row.samples or self._engine.extends(model)


def _step_row(row: Row, table: BlockTable) -> StepRow:
    job, token = row.job, row.token
    tokens = (*job.prompt, *job.sent)[row.start : row.stop] if token is None else (token,)
    return StepRow(job.request, tokens, row.start, table, row.samples, job.adapter)


def _next(row: Row, token: Token) -> Row:
    return replace(row, start=row.stop, stop=row.stop + 1, index=row.index + 1, token=token.id)


def _message(row: Row, sampled: Sampled) -> Delivered:
    job, token = row.job, sampled.token
    if sampled.problem:
        return Broken(job.request, job.attempt, SLOW[sampled.problem], sampled.problem)
    return Tokens(job.request, job.attempt, row.index, (token,), job.finish(row.index, token.id))
