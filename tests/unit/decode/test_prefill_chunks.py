"""The cuts of a prefill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aegis.core.estimators import Hardware, Latency
from aegis.sim.faults.fake_models import BLOCK_TOKENS, make_spec
from decode.prefill_chunks import chunk_stop
from decode.sequences import Sequence, Where
from tests.sim.driven import make_job

SPEC = make_spec(0, image_pages=1, block_bytes=1024)
LATENCY = Latency(SPEC.manifest, Hardware())


def waiting(prompt: int, done: int = 0, *, logprobs: int | None = None) -> Sequence:
    job = make_job(1, SPEC, prompt=prompt)
    job = replace(job, sampling=replace(job.sampling, prompt_logprobs=logprobs))
    sequence = Sequence(job, 0, -1, prompt, SPEC, None, Where.NOWHERE)
    sequence.lacks -= done
    return sequence


@given(st.integers(1, 4000), st.integers(0, 249), st.integers(0, 40_000_000), st.integers(1, 600))
def test_a_chunk_is_the_longest_that_is_in_time(prompt: int, done: int, chunk_ns: int, least: int) -> None:
    start = min(done * BLOCK_TOKENS, (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    stop = chunk_stop(waiting(prompt, start), LATENCY, chunk_ns=chunk_ns, least_tokens=least)
    assert start < stop <= prompt
    assert stop == prompt or (stop % 4 == 0 and stop - start >= least)
    shorter_would_do = stop - 4 >= start + least
    assert not shorter_would_do or LATENCY.prefill_ns(stop, start) <= chunk_ns
    longer = min(stop + 4, prompt)
    assert stop == prompt or LATENCY.prefill_ns(longer, start) > chunk_ns


def test_with_time_enough_nothing_is_cut() -> None:
    assert chunk_stop(waiting(3000, 16), LATENCY, chunk_ns=1 << 60, least_tokens=1) == 3000


def test_prompts_whose_logprobs_are_asked_for_are_not_cut() -> None:
    assert chunk_stop(waiting(3000), LATENCY, chunk_ns=0, least_tokens=256) == 256
    assert chunk_stop(waiting(3000, logprobs=0), LATENCY, chunk_ns=0, least_tokens=256) == 3000
