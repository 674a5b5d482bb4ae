"""How fast the machine is, from one moment to the next: a fixed piece of work, done now and then.

Others on a machine, of whom its users may know nothing, take caches, memory bandwidth and clock rate from it: the same
steps get twice as slow for minutes. What work costs can only be compared where that is known. The work is like an
engine's, a decode step and a short prompt of a small model; its processor time is taken, so that waiting for a
processor does not count. It needs about two hundredths of one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

_EVERY_S = 0.4
_PASSES = 4  # of a step that is measured, after one that brings it back into the caches
_LAYERS, _WIDTH, _INNER, _HEADS, _CONTEXT, _PROMPT = 4, 192, 512, 3, 256, 192


class Reading(Struct, frozen=True):
    """The processor time of a step and of a prompt then."""

    at_ns: int
    step_ns: int
    prompt_ns: int


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Meanwhile readings are appended to the file, by a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "bench.yardstick", str(file)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _read_for_ever(file: Path) -> None:
    import torch
    from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = ((_WIDTH, _WIDTH),) * 4 + ((_WIDTH, _INNER),) * 2 + ((_INNER, _WIDTH),)
    layers = [[torch.randn(shape) / shape[0] ** 0.5 for shape in shapes] for _ in range(_LAYERS)]
    past = torch.randn(_HEADS, _CONTEXT, _WIDTH // _HEADS)
    row, prompt = torch.randn(1, _WIDTH), torch.randn(_PROMPT, _WIDTH)

    def run(x: torch.Tensor, *, alone: bool) -> None:
        for q, k, v, o, gate, up, down in layers:
            h = rms_norm(x, (_WIDTH,))
            heads = [(h @ w).view(len(h), _HEADS, -1).transpose(0, 1) for w in (q, k, v)]
            keys, values = (heads[1], heads[2]) if alone else (torch.cat((past, each), 1) for each in heads[1:])
            mixed = scaled_dot_product_attention(heads[0], keys, values, is_causal=alone)
            x = x + mixed.transpose(0, 1).reshape(len(h), -1) @ o
            h = rms_norm(x, (_WIDTH,))
            x = x + (silu(h @ gate) * (h @ up)) @ down

    with torch.inference_mode(), file.open("ab", buffering=0) as out:
        while True:
            at_ns = time.monotonic_ns()
            run(row, alone=False)
            start_ns = time.thread_time_ns()
            for _ in range(_PASSES):
                run(row, alone=False)
            stepped_ns = time.thread_time_ns()
            run(prompt, alone=True)
            done_ns = time.thread_time_ns()
            found = Reading(at_ns, stepped_ns - start_ns, done_ns - stepped_ns)
            out.write(msgspec.json.encode(found) + b"\n")
            time.sleep(_EVERY_S)


if __name__ == "__main__":
    _read_for_ever(Path(sys.argv[1]))
