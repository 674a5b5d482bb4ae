"""Runs requests through an engine as a decode instance would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aegis.core.ids import ModelId, RequestId
from aegis.core.request import Sampling, Token
from aegis.engine.block_table import BlockTable
from aegis.engine.protocol import Engine, Sampled, StepRow
from tests.unit.engine.images import Arena, Built

GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)


@dataclass
class Generation:
    """One request on its way."""

    model: ModelId
    request: RequestId
    prompt: list[int]
    blocks: BlockTable
    tokens: list[Token] = field(default_factory=list)
    first: Sampled | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def row(self) -> StepRow:
        """That makes its next token."""
        position = len(self.prompt) + len(self.tokens) - 1
        return StepRow(self.request, (self.tokens[-1].id,), position, self.blocks)


def begin(
    engine: Engine,
    arena: Arena,
    built: Built,
    request: int,
    prompt: list[int],
    *,
    room: int,
    sampling: Sampling = GREEDY,
    sent: Sequence[int] = (),
    cuts: Sequence[int] = (),
) -> Generation:
    """Prefills `prompt` and the tokens `sent` before, in chunks that end at `cuts`; `room` tokens can follow."""
    blocks = arena.take(built.manifest.kv, len(prompt) + len(sent) + room)
    run = Generation(built.spec.model, RequestId(request), prompt, blocks, [Token(token) for token in sent])
    engine.start(run.model, run.request, prompt, sent, sampling)
    tokens, start = [*prompt, *sent], 0
    for cut in cuts if engine.extends(run.model) else ():
        assert engine.step(run.model, [StepRow(run.request, tokens[start:cut], start, blocks, samples=False)]) == [None]
        start = cut
    (run.first,) = engine.step(run.model, [StepRow(run.request, tokens[start:], start, blocks)])
    assert run.first
    run.tokens.append(run.first.token)
    return run


def step(engine: Engine, runs: Sequence[Generation], steps: int = 1) -> None:
    """Decodes all of one model's sequences together."""
    for _ in range(steps):
        for run, sampled in zip(runs, engine.step(runs[0].model, [run.row() for run in runs]), strict=True):
            assert sampled
            run.tokens.append(sampled.token)
