from __future__ import annotations

import pytest

from aegis.process.openmp_threads import threads_of_process


@pytest.mark.parametrize(
    ("told", "threads"), [(None, 8), ("3", 3), ("3,2", 3), (" 5 ", 5), ("99", 8), ("0", 8), ("many", 8), ("", 8)]
)
def test_the_threads_are_those_that_openmp_starts(told: str | None, threads: int) -> None:
    assert threads_of_process(8, {} if told is None else {"OMP_NUM_THREADS": told}) == threads
