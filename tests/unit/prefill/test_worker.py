"""The calls of an engine for a prefill, or a chunk of one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aegis.core.effects import RunPrefill
from aegis.core.events import Stepped
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import ModelSpec
from aegis.core.request import Sampling, Token
from aegis.engine.block_table import BlockTable
from aegis.engine.protocol import EngineFailed, Row, Sampled
from aegis.sim.faults.fake_models import make_spec
from prefill.worker import PrefillWorker
from tests.sim.driven import make_job

A = make_spec(0, image_pages=1, block_bytes=1024)
JOB = make_job(1, A, prompt=30, sent=(8, 9))
TOKENS = (*JOB.prompt, 8, 9)
BLOCKS = ((3, 5),)


class Noting:
    """An engine that writes down what it was asked for; a position takes it a nanosecond. It is a clock, too."""

    def __init__(self, *, fails: bool = False) -> None:
        self.time_ns = 5
        self.asked: list[tuple[object, ...]] = []
        self._fails = fails

    def now_ns(self) -> int:
        return self.time_ns

    def prepare(self, spec: ModelSpec) -> None: ...

    def discard(self, spec: ModelSpec) -> None: ...

    def attach(self, spec: ModelSpec, weights_base: int) -> None: ...

    def detach(self, model: ModelId) -> None: ...

    def ready(self, model: ModelId, sampling: Sampling) -> bool:
        return True

    def start(
        self,
        model: ModelId,
        request: RequestId,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
    ) -> None:
        self.asked.append(("start", request, tuple(prompt), tuple(generated)))

    def stop(self, request: RequestId) -> None: ...

    def extend(self, model: ModelId, tokens: Sequence[int], blocks: BlockTable, start: int) -> bool:
        if self._fails:
            raise ValueError("what the model did")
        self.time_ns += len(tokens) - start
        self.asked.append(("extend", tuple(tokens), tuple(blocks), start))
        return True

    def prefill(
        self, model: ModelId, request: RequestId, tokens: Sequence[int], blocks: BlockTable, start: int = 0
    ) -> Sampled:
        self.extend(model, tokens, blocks, start)
        self.asked[-1] = ("prefill", *self.asked[-1][1:])
        return Sampled(Token(6), (Token(5),))

    def decode(self, model: ModelId, rows: Sequence[Row]) -> list[Sampled]:
        raise NotImplementedError


def test_a_whole_one_starts_the_request_and_samples() -> None:
    engine = Noting()
    stepped = PrefillWorker(engine, engine).step(RunPrefill(JOB, BLOCKS, 0, 32))
    assert stepped == Stepped(((Token(6),),), 32, (Token(5),))
    assert engine.asked == [("start", 1, JOB.prompt, (8, 9)), ("prefill", TOKENS, (3, 4), 0)]


def test_chunks_start_it_once_and_sample_at_the_end() -> None:
    engine = Noting()
    worker = PrefillWorker(engine, engine)
    stepped = [worker.step(RunPrefill(JOB, BLOCKS, *part)) for part in ((0, 16), (16, 31), (31, 32))]
    assert stepped == [Stepped((), 16), Stepped((), 15), Stepped(((Token(6),),), 1, (Token(5),))]
    assert engine.asked == [
        ("start", 1, JOB.prompt, (8, 9)),
        ("extend", TOKENS[:16], (3, 4), 0),
        ("extend", TOKENS[:31], (3, 4), 16),
        ("prefill", TOKENS, (3, 4), 31),
    ]


@pytest.mark.parametrize("stop", [16, 32])
def test_what_the_engine_raises_is_its_failure(stop: int) -> None:
    engine = Noting(fails=True)
    with pytest.raises(EngineFailed):
        PrefillWorker(engine, engine).step(RunPrefill(JOB, BLOCKS, 0, stop))
