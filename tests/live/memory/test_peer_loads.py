"""Weights that come over another device's link: byte for byte, while the other device decodes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis.core.model import LEAST_PIECES, PIECE_BYTES
from tests import checkpoints
from tests.live.market import Reference
from tests.live.server import Server, eventually, launched
from tests.live.streams import Body, Stream, client_of

pytestmark = pytest.mark.long

NAMES = ("one", "two", "three")
PROMPT = [9, 8, 7, 6, 5]
INSTANCES = ("mixed-0", "mixed-1")
SHORT, LONG = 4, 1000
LARGE = {
    "vocab_size": 24576,
    "hidden_size": 640,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
}
"""A load takes many steps of the small model: the other instance hears of it between two of them."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model, and large ones of which a device holds one, beside what it lends."""
    directory = tmp_path_factory.mktemp("large")
    shapes = {name: {} if name == "one" else LARGE for name in NAMES}
    found = {
        name: checkpoints.write(
            directory / name, "llama", tokenizer=True, seed=seed, max_position_embeddings=4096, **shapes[name]
        )
        for seed, name in enumerate(NAMES)
    }
    assert (found["two"] / "model.safetensors").stat().st_size > LEAST_PIECES * PIECE_BYTES
    return found


@pytest.fixture
def lending(tmp_path: Path, cache: Path, large: dict[str, Path]) -> Iterator[Server]:
    options = ["--models", str(large["one"].parent), "--dtype", "float32", "--mixed", "2", "--devices", "2"]
    options += ["--device-memory", "224MiB", "--host-memory", "1GiB", "--policy", "serverlessllm", "--lanes", "off"]
    with launched(tmp_path, cache, *options, "--peer-loads", "--debug-memory") as running:
        running.wait_for_ready()
        yield running


def asked(name: str, tokens: int) -> Body:
    return {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def answers(models: dict[str, Path], tokens: int) -> dict[str, list[int]]:
    return {
        name: Reference(path).greedy(PROMPT, max_tokens=tokens, ignore_eos=True).tokens for name, path in models.items()
    }


async def beside_a_stream(lending: Server) -> tuple[Stream, list[Stream]]:
    """A long answer of the small model, and short ones of the others in turn until it ends."""
    long, short = Stream(asked("one", LONG)), list[Stream]()
    async with client_of(lending.url) as client:
        running = asyncio.create_task(long.run(client))
        while not long.tokens:
            await asyncio.sleep(0.01)
        while not long.ended:
            short.append(Stream(asked(NAMES[1 + len(short) % 2], SHORT)))
            await short[-1].run(client)
        await running
    return long, short


def test_what_peers_carry_is_the_image_while_they_decode(lending: Server, large: dict[str, Path]) -> None:
    long, short = asyncio.run(beside_a_stream(lending))
    expected = answers(large, SHORT) | answers({"one": large["one"]}, LONG)
    assert long.done and long.tokens == expected["one"]
    assert all(stream.done for stream in short)
    wrong = [stream.body["model"] for stream in short if stream.tokens != expected[stream.body["model"]]]
    assert wrong == []
    eventually(lambda: lending.metrics().total("instance_peer_load_bytes_total") > PIECE_BYTES, "peers have carried")
    eventually(lambda: lending.metrics().total("memory_device_pages_lent") == 0, "nothing is lent any more")


@pytest.mark.long
def test_a_peer_that_is_killed_takes_nothing_along(lending: Server, large: dict[str, Path]) -> None:
    """Whoever loads then goes on over its own link."""
    expected = answers(large, SHORT)

    async def killed_again_and_again() -> list[Stream]:
        streams = [Stream(asked(NAMES[at % 3], SHORT)) for at in range(18)]
        async with client_of(lending.url) as client:
            for at, stream in enumerate(streams):
                eventually(lambda: lending.metrics().total("instance_up") == len(INSTANCES), "both are up again")
                running = asyncio.create_task(stream.run(client))
                if at % 6 == 3:
                    os.kill(lending.pid_of(INSTANCES[at % 4 // 2]), signal.SIGKILL)
                await running
        return streams

    streams = asyncio.run(killed_again_and_again())
    assert [stream.tokens for stream in streams] == [expected[stream.body["model"]] for stream in streams]
