"""The tests that only compute, with whatever the processors have left over beside other tests. What they say
is told when they have ended.

The kernel shares processors among sessions first (autogroups), so a low priority counts for nothing beside servers with
sessions of their own unless this one's session has it too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.schedule import COMPUTING

LEAST = 19
"""Of nice values: a hundredth of what others get."""


def _step_back() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(LEAST))


def main() -> None:
    patient = ["--timeout", "1800", "-o", "faulthandler_timeout=1860"]  # for as long others may leave nothing
    command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", *patient, *COMPUTING]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            command, start_new_session=True, preexec_fn=_step_back, stdout=said, stderr=said
        ) as tests:
            try:
                code = tests.wait()
            except KeyboardInterrupt:
                tests.terminate()
                raise
        said.seek(0)
        shutil.copyfileobj(said, sys.stdout.buffer)
    sys.exit(code)


if __name__ == "__main__":
    main()
