"""What a child takes from others is bounded, by itself and by its parent."""

from __future__ import annotations

import subprocess
import sys

_LIMITED = """
import resource
from aegis.process.child import limit_memory
if {parent}:
    resource.setrlimit(resource.RLIMIT_AS, ({parent}, {parent}))
limit_memory({nbytes}, for_good={for_good})
print(*resource.getrlimit(resource.RLIMIT_AS))
"""
_GIB = 1 << 30


def _limits(nbytes: int, *, for_good: bool, parent: int = 0) -> tuple[int, int]:
    """Of a process that limits itself so: the one in force, and the highest that it may set."""
    code = _LIMITED.format(nbytes=nbytes, for_good=for_good, parent=parent)
    soft, hard = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return int(soft), int(hard)


def test_a_limit_is_beside_what_the_process_has_and_may_be_for_good() -> None:
    soft, hard = _limits(4 * _GIB, for_good=True)
    assert 4 * _GIB < soft == hard < 8 * _GIB
    soft, hard = _limits(4 * _GIB, for_good=False)
    assert 4 * _GIB < soft < 8 * _GIB and hard != soft


def test_a_lower_limit_of_its_parent_stays() -> None:
    for for_good in (True, False):
        assert _limits(4 * _GIB, for_good=for_good, parent=3 * _GIB) == (3 * _GIB, 3 * _GIB)
