"""The Triton kernels: what they compute, under Triton's interpreter, which stays within a process of its own; and that
they compile for GPUs, which needs none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch

from aegis.core.errors import UserError

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_as_interpreted() -> None:
    files = sorted(map(str, HERE.glob("interpreted_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from aegis.engine.gpu import triton_kernels as kernels

def built(kernel, capability, dtype, **constants):
    signature = {name: "constexpr" for name in constants}
    for name in kernel.arg_names:
        kind = "fp32" if name in ("scale", "softcap") else "i32"
        if name in ("unit_stride", "keys_at", "values_at"):
            kind = "i64"
        elif name in ("partial", "weight"):
            kind = "*fp32"
        elif name in ("lengths", "starts", "units"):
            kind = "*i32"
        elif name in ("query", "key", "value", "sinks", "out"):
            kind = f"*{dtype}"
        signature.setdefault(name, kind)
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]

cache = dict(TYPE=tl.bfloat16, ALIGNED=True, SIZE=16)
for capability in (80, 90):
    built(kernels.append, capability, "bf16", KEY_WIDTH=1024, VALUE_WIDTH=512, TILE=1024, **cache)
    built(kernels.combine, capability, "bf16", QUERY_HEADS=32, VALUE_DIM=128, SPLITS=8, HAS_SINKS=True, VALUE_TILE=128)
    part = dict(HEADS=8, GROUP=4, KEY_DIM=128, VALUE_DIM=96, SPLITS=8, HAS_SOFTCAP=True, ROWS=16, POSITIONS=64,
                KEY_TILE=128, VALUE_TILE=128)
    ptx = built(kernels.attend_part, capability, "bf16", **part, **cache)
    print("mma" in ptx)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_compile_for_gpus_and_use_their_matrix_units(tmp_path: Path) -> None:
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "error", [RuntimeError("Failed to find C compiler."), CalledProcessError(1, ["gcc", "main.c"]), OSError("no space")]
)
def test_an_engine_says_at_once_that_triton_cannot_launch(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each step would fail, and with it its requests."""
    import triton

    from aegis.engine.gpu.decode import GpuDecoder

    class Driver:
        @property
        def active(self) -> None:
            raise error

    monkeypatch.setattr(triton.runtime, "driver", Driver())
    with pytest.raises(UserError) as raised:
        GpuDecoder.on_cuda(torch.device("cuda"))
    assert raised.value.message.startswith(f"Triton cannot launch kernels here: {error} (it needs a C compiler")
