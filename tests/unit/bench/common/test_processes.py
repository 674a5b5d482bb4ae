"""What processes have used, also those that have ended, and what they hold together."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

from bench.common.processes import cpu_s, shared_out_bytes

MIB = 1 << 20
_BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_the_processor_time_of_children_that_have_ended_counts() -> None:
    before_s = cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", _BUSY], check=True)
    ticks_s = 4 / os.sysconf("SC_CLK_TCK")  # user's and system's time, before and after, are whole ticks
    assert cpu_s(os.getpid()) - before_s >= 0.5 - ticks_s


def test_a_page_that_two_share_is_half_of_each() -> None:
    size = 64 * MIB
    before = shared_out_bytes([os.getpid()])
    with mmap.mmap(-1, size) as shared:
        shared.write(b"x" * size)
        alone = shared_out_bytes([os.getpid()]) - before
        ready, done = os.pipe(), os.pipe()
        if not (child := os.fork()):
            shared[:: mmap.PAGESIZE]
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        both, ours = shared_out_bytes([os.getpid(), child]), shared_out_bytes([os.getpid()])
        os.write(done[1], b"x")
        os.waitpid(child, 0)
    assert alone > 0.9 * size
    assert both - before < 1.5 * size and ours - before < 0.75 * size


def test_a_process_that_has_ended_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert shared_out_bytes([child.pid]) == 0


_BESIDE_A_DIRECTORY = """
import tempfile, time
from bench.common.processes import ended_in_order
with ended_in_order(), ended_in_order(), tempfile.TemporaryDirectory() as directory:
    print(directory, flush=True)
    time.sleep(60)
"""


def test_sigterm_leaves_nothing_behind() -> None:
    process = subprocess.Popen([sys.executable, "-c", _BESIDE_A_DIRECTORY], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    directory = Path(process.stdout.readline().strip())
    assert directory.is_dir()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not directory.exists()
