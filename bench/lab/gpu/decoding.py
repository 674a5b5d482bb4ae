"""Decoding on a GPU: beside the memory's bandwidth, and after many switches. Not run on a GPU yet."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.common.figures import Figure, at_least, at_most
from bench.lab.gpu.gpu_instance import GpuInstance, Resident
from bench.lab.gpu.random_models import LLAMA_8B, make, small

SWITCHES = 100
_PROMPT = [(7 * i) % 30_000 + 1 for i in range(500)]
_READ_BYTES = 4 << 30


def figures(directory: Path, *, tiny: bool) -> Iterator[Figure]:
    yield from _switching(directory)
    yield from _roofline(directory, tiny=tiny)


def _switching(directory: Path) -> Iterator[Figure]:
    """Two models take turns in memory for one; every turn's tokens must be those of the first, which had no graphs."""
    models = [make(f"turn-{layers}", small(layers), directory) for layers in (6, 8)]
    largest = max(model.spec.manifest.image_bytes for model in models)
    gpu = GpuInstance(weight_bytes=largest + (64 << 20))
    residents = [gpu.add(model, seed) for seed, model in enumerate(models)]
    prompts = [_PROMPT[: 20 + 30 * row] for row in range(5)]
    expected: dict[int, list[list[int]]] = {}
    differing = 0
    for switch in range(SWITCHES):
        resident = residents[switch % 2]
        gpu.place(resident, first=switch % 7)  # other pages every time
        gpu.finish(gpu.load(resident))
        tokens = gpu.generate(resident, prompts, steps=8).tokens
        differing += tokens != expected.setdefault(switch % 2, tokens)
        gpu.evict(resident)
    decoder = gpu.engine.decoder
    assert decoder is not None and decoder.graphs is not None
    yield at_least("graphs kept over 100 switches", decoder.graphs.count, "graphs", 2)
    yield at_most("turns of 100 whose tokens differ from the first", differing, "turns", 0)
    yield Figure("memory that graphs took", decoder.graphs.nbytes / (1 << 20), "MiB")
    gpu.place(residents[0])
    gpu.finish(gpu.load(residents[0]))
    yield at_most("waits for the GPU in a step", _waits(gpu, residents[0]), "waits", 1)
    gpu.close()


def _waits(gpu: GpuInstance, resident: Resident) -> float:
    """How often a step waits for the GPU, by torch's own count."""
    steps = 6
    counts = []
    for most in (1, 1 + steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            gpu.generate(resident, [_PROMPT[:20]], steps=most)
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(each.message) for each in caught))
    return (counts[1] - counts[0]) / steps


def _roofline(directory: Path, *, tiny: bool) -> Iterator[Figure]:
    """Bytes that a step at batch 1 has to read, weights and KV, over its time, beside what memory gives at most."""
    model = make("roofline", small(8) if tiny else LLAMA_8B, directory)
    manifest = model.spec.manifest
    embedding = manifest.vocab_size * manifest.hidden_size * manifest.kv.itemsize  # of which a step reads one row
    gpu = GpuInstance(weight_bytes=manifest.image_bytes + (64 << 20), kv_bytes=3 << 30)
    resident = gpu.add(model, seed=3)
    gpu.place(resident)
    gpu.finish(gpu.load(resident))
    roof = _read_bytes_per_s(64 << 20 if tiny else _READ_BYTES)
    yield Figure("memory read", roof / 1e9, "GB/s")
    gpu.generate(resident, [_PROMPT], steps=8)
    for batch in (1, 8, 32):
        durations_ns = gpu.generate(resident, [_PROMPT] * batch, steps=64).durations_ns[8:]
        step_s = statistics.median(durations_ns) / 1e9
        nbytes = manifest.image_bytes - embedding + batch * (len(_PROMPT) + 32) * manifest.kv.token_bytes
        share = nbytes / step_s / roof
        yield Figure(f"decode, batch {batch}", batch / step_s, "tokens/s")
        name = f"decode, batch {batch} ÷ memory read"
        yield at_least(name, share, "", 0.70) if batch == 1 else Figure(name, share, "")
    gpu.close()


def _read_bytes_per_s(nbytes: int) -> float:
    """One pass of a sum over memory larger than any cache, the best of ten."""
    memory = torch.zeros(nbytes // 4, dtype=torch.float32, device="cuda")
    durations_s = []
    for _ in range(10):
        start_s = time.perf_counter()
        memory.sum().item()
        durations_s.append(time.perf_counter() - start_s)
    return nbytes / min(durations_s)
