"""A process may have as many files open as its hard limit says, within reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALLOW = """
import resource
from aegis.process.open_files import allow_many_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(allow_many_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "after"), [(256, 512, 512), (512, 512, 512), (100, 1000, 1000)])
def test_the_soft_limit_becomes_the_hard_one(soft: int, hard: int, after: int) -> None:
    code = ALLOW.format(soft=soft, hard=hard)
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.split() == [str(after), str(after), str(hard)]
