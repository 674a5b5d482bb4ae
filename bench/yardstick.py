"""How fast the machine is, from one moment to the next: a fixed piece of work, done now and then.

Others on a machine, of whom its users may know nothing, take caches, memory bandwidth and clock rate from it: the same
steps get twice as slow for minutes. What work costs can only be compared where that is known. The work is like an
engine's, a decode step and a short prompt of a small model; its processor time is taken, so that waiting for a
processor does not count. It needs two or three hundredths of one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

_EVERY_S = 0.4
_PASSES = 4  # of a step that is measured, after one that brings it back into the caches
_LAYERS, _WIDTH, _INNER, _HEADS, _CONTEXT, _PROMPT = 4, 192, 512, 3, 256, 96


class Reading(Struct, frozen=True):
    """The processor time of a step and of a prompt then."""

    at_ns: int
    step_ns: int
    prompt_ns: int


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Meanwhile readings are appended to the file, by a process of its own, which has begun."""
    with subprocess.Popen([sys.executable, "-m", "bench.yardstick", str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


class Yardstick:
    """The work."""

    def __init__(self) -> None:
        shapes = ((_WIDTH, _WIDTH),) * 4 + ((_WIDTH, _INNER),) * 2 + ((_INNER, _WIDTH),)
        self._layers = [[torch.full(shape, 1 / shape[0]) for shape in shapes] for _ in range(_LAYERS)]
        self._past = torch.ones(_HEADS, _CONTEXT, _WIDTH // _HEADS)
        self._row, self._prompt = torch.ones(1, _WIDTH), torch.ones(_PROMPT, _WIDTH)

    def read(self) -> Reading:
        """Now."""
        at_ns = time.monotonic_ns()
        self._run(self._row, self._past)
        start_ns = time.thread_time_ns()
        for _ in range(_PASSES):
            self._run(self._row, self._past)
        stepped_ns = time.thread_time_ns()
        self._run(self._prompt, None)
        return Reading(at_ns, stepped_ns - start_ns, time.thread_time_ns() - stepped_ns)

    def _run(self, x: torch.Tensor, past: torch.Tensor | None) -> None:
        """`x` is `(tokens, width)`, `past` `(heads, tokens, width of a head)`: keys and values at once."""
        for q, k, v, o, gate, up, down in self._layers:
            h = rms_norm(x, (_WIDTH,))
            query, *kv = [(h @ w).view(len(h), _HEADS, -1).transpose(0, 1) for w in (q, k, v)]
            keys, values = kv if past is None else [torch.cat((past, each), 1) for each in kv]
            mixed = scaled_dot_product_attention(query, keys, values, is_causal=past is None)
            x = x + mixed.transpose(0, 1).reshape(len(h), -1) @ o
            h = rms_norm(x, (_WIDTH,))
            x = x + (silu(h @ gate) * (h @ up)) @ down


def _read_for_ever(file: Path) -> None:
    torch.set_num_threads(1)
    yardstick = Yardstick()
    with torch.inference_mode(), file.open("ab", buffering=0) as out:
        yardstick.read()
        print("reading", flush=True)
        while True:
            out.write(msgspec.json.encode(yardstick.read()) + b"\n")
            time.sleep(_EVERY_S)


if __name__ == "__main__":
    _read_for_ever(Path(sys.argv[1]))
