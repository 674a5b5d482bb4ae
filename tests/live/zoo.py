"""Small models of architectures that nothing in aegis knows by name, and of some that cannot be served."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoints

SERVED = (
    "apertus",
    "cohere2",
    "deepseek_v2",
    "ernie4_5",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "helium",
    "nemotron",
    "persimmon",
    "seed_oss",
    "smollm3",
)
REFUSED = {
    "bloom": "attention of its own",
    "doge": "masks its attention in a way of its own",
    "mamba": "state-space",
    "minimax": "linear_attention layers",
    "rwkv": "recurrent state",
}
MEMORY = ("--device-memory", "12MiB", "--host-memory", "16MiB")
"""Six pages for two instances, of which a model takes one and a slab of KV another; and four slabs of the host."""


def write(directory: Path) -> None:
    for seed, model_type in enumerate([*SERVED, *REFUSED]):
        checkpoints.write(directory / model_type, model_type, seed=seed)
