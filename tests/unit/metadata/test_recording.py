"""The memory of a record while its call is answered, and writing all of it to the server again."""

from __future__ import annotations

import gc
import tracemalloc

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.core.request import FinishReason, Sampling, Token
from aegis.metadata.batches import Sequence, assemble
from aegis.metadata.recording import CallState, Recording
from proxy.http.call_records import RecordedCall
from proxy.http.market import Delta, Finished, PromptScores

TOKENS = 4000  # what the interpreter keeps for new objects is little beside them


def recording(sequences: int = 1, known: list[Sequence] | None = None) -> Recording:
    asked = RecordedCall("r", "f", ModelId("m"), Slo(1, 1), Sampling(max_tokens=9999), sequences)
    return Recording(asked, 7, known or [Sequence() for _ in range(sequences)], lambda recording: None)


def token(number: int) -> Token:
    """With 20 alternatives, none of them shared with another token."""
    return Token(1000 + number, -number / 7, tuple((2000 + number + i, -number / 7 - i) for i in range(20)))


def test_what_was_written_takes_a_tenth_and_what_is_settled_nothing() -> None:
    call = recording()
    gc.collect()
    tracemalloc.start()
    try:
        call.note(0, Delta(tuple(map(token, range(TOKENS)))))
        as_objects = tracemalloc.get_traced_memory()[0]
        call.wrote(call.batch())
        written = tracemalloc.get_traced_memory()[0]
        call.settle()
        call.note(0, Delta(tuple(map(token, range(TOKENS)))))
        settled = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert as_objects > TOKENS * 1000
    assert written < as_objects / 6
    assert settled < as_objects / 15


def test_a_record_that_is_gone_is_written_again_as_it_was() -> None:
    """What was read from it before, what was written since, and what never was."""
    before = [Sequence([token(0)], None, (token(90),)), Sequence([token(50)])]
    call = recording(2, before)
    call.note(0, Delta((token(1),)))
    call.note(1, PromptScores((token(91),)))
    written = call.batch()
    assert assemble([written.data], 2)[0].tokens == [], "it begins where the record ends"
    assert call.wrote(written)
    call.note(1, Delta((token(51), token(52))))
    call.note(0, Finished(FinishReason.STOP))
    call.forget_written()
    batch = call.batch()
    first, second = assemble([batch.data], 2)
    assert (first.tokens, first.finish, first.scores) == ([token(0), token(1)], FinishReason.STOP, (token(90),))
    assert (second.tokens, second.finish, second.scores) == ([token(50), token(51), token(52)], None, (token(91),))
    assert call.wrote(batch) and not call.batch().data


def test_what_could_not_be_written_is_in_the_next_batch() -> None:
    call = recording()
    call.note(0, Delta((token(0),)))
    call.batch()
    call.note(0, Delta((token(1),)))
    call.note(0, Finished(FinishReason.LENGTH))
    call.close()
    batch = call.batch()
    (known,) = assemble([batch.data], 1)
    assert (known.tokens, known.finish) == ([token(0), token(1)], FinishReason.LENGTH)
    assert batch.state is CallState.FINISHED and call.wrote(batch)
