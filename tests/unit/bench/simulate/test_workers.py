"""Tasks in several processes."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from bench.common.processes import command_of
from bench.common.provenance import ROOT
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


def test_what_breaks_is_not_said_to_have_been_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="a simulation broke, which it should not; the error is above"):
        each(math.sqrt, [-1.0, -1.0], jobs=2, title="")
    assert "ValueError" in capfd.readouterr().err


def test_a_process_that_was_killed_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="was ended from outside"):
        each(os._exit, [9, 9], jobs=2, title="")


_SIMULATING = """
import os, sys, time
from pathlib import Path
from bench.simulate.workers import each

def simulate(task):
    (Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    each(simulate, [1, 2], jobs=2, title="")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_goes_on_where_its_command_was_ended(number: signal.Signals, tmp_path: Path) -> None:
    script, begun = tmp_path / "simulating.py", tmp_path / "begun"
    script.write_text(_SIMULATING)
    begun.mkdir()
    command = subprocess.Popen([sys.executable, script, begun], env=os.environ | {"PYTHONPATH": str(ROOT)})
    while len(at_work := [int(each.name) for each in begun.iterdir()]) < 2:
        time.sleep(0.05)
    command.send_signal(number)
    command.wait()
    deadline_s = time.monotonic() + 20
    while any(map(command_of, at_work)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
