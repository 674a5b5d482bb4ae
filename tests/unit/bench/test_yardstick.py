"""Readings of a machine's speed."""

from __future__ import annotations

import time

from bench.yardstick import Yardstick


def test_a_reading_tells_when_it_was_and_what_processor_time_each_part_took() -> None:
    yardstick, before_ns, had_ns = Yardstick(), time.monotonic_ns(), time.thread_time_ns()
    read = yardstick.read()
    assert before_ns <= read.at_ns <= time.monotonic_ns()
    assert min(read.step_ns, read.prompt_ns) > 0
    assert read.step_ns + read.prompt_ns <= time.thread_time_ns() - had_ns
