"""Failures become one informative line, whatever a checkpoint put into it."""

from __future__ import annotations

import pytest

from aegis.models.failures import one_line, out_of_memory, refused


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("rope_theta"), "'rope_theta' is not given, or not known"),
        (KeyError("no such: thing"), "no such: thing"),
        (ValueError("x: y:\n z\n w"), "x: y: z"),
        (ValueError("first\nsecond"), "first"),
        (ValueError(""), "ValueError"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 5000), "x" * 300),
    ],
)
def test_an_error_is_a_line(error: Exception, said: str) -> None:
    assert one_line(error) == said


def test_a_refusal_is_one_printable_line_whatever_it_quotes() -> None:
    message = refused("/m\nx", "the tensor \x1b[2J\r\n" + "y" * 1000).message
    assert message.isprintable() and message.startswith("/m x: the tensor  [2J  yyy")
    assert len(message) == len("/m x: ") + 300


def test_want_of_memory_is_found_behind_what_was_made_of_it() -> None:
    torchs = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")
    outer = ValueError("cannot load it")
    outer.__cause__ = torchs
    assert out_of_memory(outer) and out_of_memory(MemoryError())
    assert not out_of_memory(ValueError("no")) and not out_of_memory(None)
