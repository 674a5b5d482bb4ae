"""Tasks in several processes."""

import multiprocessing
import os
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from bench.simulate.workers import each
from bench.workloads import traces


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_answers_come_in_the_order_of_the_tasks(jobs: int) -> None:
    assert each(abs, [-3, 1, -2, 5, 0], jobs=jobs, title="") == [3, 1, 2, 5, 0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_user_can_mend_is_raised_and_no_process_stays(jobs: int) -> None:
    with pytest.raises(UserError, match="expected a trace whose name ends in"):
        each(traces.read, [Path(__file__)] * 3, jobs=jobs, title="")
    assert multiprocessing.active_children() == []


def test_a_process_that_was_killed_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="was ended from outside"):
        each(os._exit, [9, 9], jobs=2, title="")
