"""The steps of one run of decoding. Messages are looked at between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from aegis.core.effects import DecodeRow, RunDecode
from aegis.core.events import InstanceEvent, StepFailed, Stepped
from aegis.core.ids import ModelId
from aegis.core.messages import FromInstance, Tokens
from aegis.core.request import Token
from aegis.sim.faults.state import FaultWorldState


class Runner(Protocol):
    """The instance whose run it is."""

    def decode(self, model: ModelId, rows: Sequence[DecodeRow]) -> tuple[Token, ...]: ...

    def after(self, delay_ns: int, action: Callable[[], None]) -> None: ...

    def feed(self, event: InstanceEvent) -> None: ...

    def say(self, message: FromInstance) -> None: ...

    def listen(self) -> bool:
        """Whether what was heard ends the run."""
        ...


class DecodeRun:
    """`fails`: the engine raises in its first step."""

    def __init__(self, instance: Runner, state: FaultWorldState, effect: RunDecode, *, fails: bool) -> None:
        self._instance = instance
        self._state = state
        self._effect = effect
        self._fails = fails
        self._rows = effect.rows
        self._steps: list[tuple[Token, ...]] = []
        self._started_ns = state.now_ns

    def step(self) -> None:
        made = self._instance.decode(self._effect.model, self._rows)
        self._instance.after(2_000_000 + self._state.draw.below(1_000_000), lambda: self._stepped(made))

    def _stepped(self, made: tuple[Token, ...]) -> None:
        if self._fails:
            self._instance.feed(StepFailed("drawn"))
            return
        self._steps.append(made)
        finished = [self._tell(row, token) for row, token in zip(self._rows, made, strict=True)]
        self._rows = tuple(
            replace(row, index=row.index + 1, token=token.id, position=row.position + 1)
            for row, token in zip(self._rows, made, strict=True)
        )
        ends = any(finished) or len(self._steps) == self._effect.steps or self._state.now_ns >= self._effect.until_ns
        if ends or self._instance.listen():
            self._instance.feed(Stepped(tuple(self._steps), self._state.now_ns - self._started_ns))
        else:
            self.step()

    def _tell(self, row: DecodeRow, token: Token) -> bool:
        finish = row.job.finish(row.index, token.id)
        self._instance.say(Tokens(row.job.request, row.job.attempt, row.index, (token,), finish))
        return finish is not None
