"""The steps of one run. Messages are looked at between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from aegis.core.effects import Row, Run
from aegis.core.events import InstanceEvent, StepFailed, Stepped
from aegis.core.ids import ModelId
from aegis.core.messages import FromInstance, Tokens
from aegis.core.request import Token
from aegis.sim.faults.state import FaultWorldState


class Runner(Protocol):
    """The instance whose run it is."""

    def step(self, model: ModelId, rows: Sequence[Row]) -> list[Token | None]: ...

    def after(self, delay_ns: int, action: Callable[[], None]) -> None: ...

    def feed(self, event: InstanceEvent) -> None: ...

    def say(self, message: FromInstance) -> None: ...

    def listen(self, lane: int) -> bool:
        """Whether what was heard ends the run."""
        ...


class Steps:
    """`fails`: the engine raises in its first step."""

    def __init__(self, instance: Runner, state: FaultWorldState, run: Run, *, fails: bool) -> None:
        self._instance = instance
        self._state = state
        self._run = run
        self._fails = fails
        self._rows = run.rows
        self._made: list[tuple[Token, ...]] = []
        self._started_ns = state.now_ns

    def step(self) -> None:
        made = self._instance.step(self._run.model, self._rows)
        prompts = [row.stop - row.start for row in self._rows if not row.decodes]
        least_ns = 1_000_000 + 10_000 * sum(prompts) if prompts else 2_000_000
        self._instance.after(least_ns + self._state.draw.below(1_000_000), lambda: self._stepped(made))

    def _stepped(self, made: Sequence[Token | None]) -> None:
        if self._fails:
            self._instance.feed(StepFailed("drawn", self._run.lane))
            return
        tokens = tuple([token for token in made if token is not None])
        if tokens:
            self._made.append(tokens)
        decoded = [(row, token) for row, token in zip(self._rows, made, strict=True) if row.decodes and token]
        finished = [self._tell(row, token) for row, token in decoded]
        ends = any(finished) or len(decoded) < len(self._rows) or len(self._made) == self._run.steps
        self._rows = tuple([_next(row, token) for row, token in decoded])
        if ends or self._state.now_ns >= self._run.until_ns or self._instance.listen(self._run.lane):
            lasted_ns = self._state.now_ns - self._started_ns
            self._instance.feed(Stepped(tuple(self._made), lasted_ns, lane=self._run.lane))
        else:
            self.step()

    def _tell(self, row: Row, token: Token) -> bool:
        finish = row.job.finish(row.index, token.id)
        self._instance.say(Tokens(row.job.request, row.job.attempt, row.index, (token,), finish))
        return finish is not None


def _next(row: Row, token: Token) -> Row:
    return replace(row, start=row.stop, stop=row.stop + 1, index=row.index + 1, token=token.id)
