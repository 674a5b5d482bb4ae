"""pytest for tests that only compute, with whatever the processors have left over beside tests that are timed.

    python -m tests.background tests/sim

The kernel shares processors among sessions first (autogroups), so a low priority counts for nothing beside servers with
sessions of their own unless this one's session has it too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LEAST = 19
"""Of nice values: a hundredth of what others get."""


def _step_back() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(LEAST))


def main() -> None:
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with subprocess.Popen(command, start_new_session=True, preexec_fn=_step_back) as tests:
        try:
            code = tests.wait()
        except KeyboardInterrupt:
            tests.terminate()
            raise
    sys.exit(code)


if __name__ == "__main__":
    main()
