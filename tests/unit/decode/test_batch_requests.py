"""Which deadlines of a batch count when turns are planned."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.core.model import Slo
from aegis.sim.faults.fake_models import make_spec
from decode.batch_requests import BatchRequests
from decode.sequences import Sequence, Where
from tests.sim.driven import make_job

SLO = Slo()
SPEC = make_spec(1, image_pages=1, block_bytes=1024)

AGAIN = replace(make_job(2, SPEC), sent=(7, 8))


def streaming(request: int, where: Where) -> Sequence:
    return Sequence(make_job(request, SPEC), request, 1, 16, SPEC, None, where)


def due_ns(*sequences: Sequence, defers: bool) -> list[int]:
    seen = BatchRequests(list(sequences), SLO, defers_refused=False, defers_arriving=defers)
    return [due for due, _ in seen.decoding]


@pytest.mark.parametrize("defers", [False, True])
def test_who_is_on_the_way_when_a_turn_is_over_does_not_get_its_batch_another_one(defers: bool) -> None:
    here, coming = streaming(1, Where.DEVICE), streaming(2, Where.ARRIVING)
    both = [SLO.due_ns(0, 1), SLO.due_ns(0, 2)]
    assert due_ns(here, coming, defers=defers) == (both[:1] if defers else both)
    assert due_ns(coming, defers=defers) == both[1:], "but where there are no others"


def test_prefills_of_those_that_were_here_before_are_told_apart() -> None:
    first, again = (Sequence(job, 0, -1, 32, SPEC, None, Where.NOWHERE) for job in (make_job(1, SPEC), AGAIN))
    seen = BatchRequests([first, again, streaming(3, Where.DEVICE)], SLO, defers_refused=False)
    assert (seen.prompts, seen.tokens) == (2, 2 * seen.again_tokens)
