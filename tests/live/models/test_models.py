"""Models come and go while others are served: registering never holds up a stream, and what is refused harms nobody."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from transformers import BertConfig, BertForMaskedLM

from tests import checkpoints
from tests.live.market import MARKET, Reference
from tests.live.server import ROOT, Server
from tests.live.streams import Body, Stream, client_of, until

COMMAND_S = 120
REST_S = 0.1
"""Between two streams, or what is registered beside them would have to wait for a processor."""

PROMPT = [9, 8, 7, 6, 5]
GREEDY: Body = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "ignore_eos": True}

RecordProperty = Callable[[str, object], None]


async def aegis_models(server: Server, *arguments: str) -> tuple[int, str]:
    """Exit code and output of `aegis models …` against the server."""
    command = [sys.executable, "-m", "aegis.cli.main", "models", *arguments, "--url", server.url]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = await asyncio.to_thread(
        subprocess.run, command, env=variables, capture_output=True, text=True, timeout=COMMAND_S
    )
    return done.returncode, done.stdout + done.stderr


@asynccontextmanager
async def traffic(server: Server, bodies: Sequence[Body]) -> AsyncIterator[list[Stream]]:
    """Runs each of these again and again; each has to end well and as the first of its kind did."""
    over = asyncio.Event()
    streams: list[Stream] = []

    async def keep_up(body: Body) -> None:
        first: Stream | None = None
        while not over.is_set():
            stream = Stream(body)
            streams.append(stream)
            await stream.run(client)
            assert stream.done, stream.error
            first = first or stream
            assert stream.tokens == first.tokens
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), REST_S)

    async with client_of(server.url) as client, asyncio.TaskGroup() as group:
        for body in bodies:
            group.create_task(keep_up(body))
        try:
            yield streams
        finally:
            over.set()


def truncated(directory: Path) -> Path:
    file = checkpoints.write(directory, "llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return directory


def encoder(directory: Path) -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=32)).save_pretrained(directory)
    return directory


def pickled(directory: Path) -> Path:
    file = checkpoints.write(directory, "llama") / "model.safetensors"
    return file.rename(directory / "pytorch_model.bin").parent


def too_large(directory: Path) -> Path:
    return checkpoints.write(directory, "llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=3)


REFUSED: dict[Callable[[Path], Path], list[str]] = {
    truncated: ["model.safetensors", "truncated"],
    encoder: ["BertForMaskedLM", "causal"],
    pickled: ["pytorch_model.bin", "pickled", "safetensors"],
    too_large: ["MiB", "10 MiB", "--device-memory"],
}


@pytest.mark.long
def test_models_are_added_refused_and_removed_beside_running_streams(
    server: Server, references: dict[str, Reference], tmp_path: Path, record_property: RecordProperty
) -> None:
    name = "olmo2"
    newcomer = checkpoints.write(tmp_path / name, name, tokenizer=True)
    expected = Reference(newcomer).greedy(PROMPT, max_tokens=50, ignore_eos=True)
    served = list(MARKET)[:3]

    sources = {make: make(tmp_path / make.__name__) for make in REFUSED}

    async def refused(make: Callable[[Path], Path], reasons: Sequence[str]) -> None:
        source = sources[make]
        code, told = await aegis_models(server, "add", str(source), "--name", make.__name__)
        assert (code, told.count("\n")) == (1, 1), told
        assert [reason for reason in [*reasons, str(source)] if reason not in told] == []

    async def main() -> list[Stream]:
        async with traffic(server, [GREEDY | {"model": model} for model in served]) as streams:
            await until(lambda: sum(stream.done for stream in streams) >= len(served), "streams are running")
            await asyncio.gather(*(refused(make, reasons) for make, reasons in REFUSED.items()))
            for _ in range(2):  # it comes, goes and comes again
                assert (await aegis_models(server, "add", str(newcomer)))[0] == 0
                _, listed = await aegis_models(server, "list")
                assert {line.split()[0] for line in listed.splitlines()[1:]} == {*MARKET, name}
                assert (await _complete(server, GREEDY | {"model": name})).tokens == expected.tokens
                assert (await aegis_models(server, "remove", name))[0] == 0
        return streams

    streams = asyncio.run(main())
    for model in served:
        tokens = references[model].greedy(PROMPT, max_tokens=50, ignore_eos=True).tokens
        assert all(stream.tokens == tokens for stream in streams if stream.body["model"] == model)
    record_property("streams", len(streams))
    record_property("longest_gap_s", max(stream.longest_gap_s for stream in streams))
    for make in REFUSED:
        assert server.get(f"/v1/models/{make.__name__}").status_code == 404
    metrics = server.wait_for_freed_memory()
    assert metrics.total("instance_restarts_total") == 0


def test_removing_a_model_ends_its_requests_with_one_error(server: Server, tmp_path: Path) -> None:
    checkpoint = checkpoints.write(tmp_path / "leaving", "stablelm", max_position_embeddings=8192)
    body: Body = GREEDY | {"model": "leaving", "max_tokens": 8000}  # longer than it takes to remove it

    async def main() -> None:
        assert (await aegis_models(server, "add", str(checkpoint)))[0] == 0
        async with client_of(server.url) as client:
            streams = [Stream(body) for _ in range(6)]
            other = Stream(GREEDY | {"model": "llama"})
            running = [asyncio.create_task(stream.run(client)) for stream in [*streams, other]]
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: all(len(stream.tokens) > 2 for stream in streams), "all are running")
            assert (await aegis_models(server, "remove", "leaving"))[0] == 0
            await asyncio.gather(*running)
            for stream in streams:
                assert not stream.done
                assert stream.error and stream.error["message"] == "model 'leaving' was removed"
            reply = await whole
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
            assert reply.json()["error"]["message"] == "model 'leaving' was removed"
            assert other.done
            assert (await client.post("/v1/completions", json=body)).status_code == 404
        assert (await aegis_models(server, "add", str(checkpoint)))[0] == 0
        assert (await _complete(server, body | {"max_tokens": 20})).tokens == streams[0].tokens[:20]
        assert (await aegis_models(server, "remove", "leaving"))[0] == 0

    asyncio.run(main())


def test_adds_and_removes_of_one_name_at_once_leave_one_truth(server: Server, tmp_path: Path) -> None:
    checkpoint = checkpoints.write(tmp_path / "twin", "starcoder2")
    load, unload = {"source": str(checkpoint)}, {"model": "twin"}

    async def main() -> None:
        async with client_of(server.url) as client:
            adds = [client.post("/models/load", json=load) for _ in range(2)]
            codes = sorted(reply.status_code for reply in await asyncio.gather(*adds))
            assert codes[0] == 200 and set(codes[1:]) <= {400, 409}
            assert (await _complete(server, GREEDY | {"model": "twin"})).done
            assert (await client.post("/models/unload", json=unload)).status_code == 200
            assert (await client.post("/models/unload", json=unload)).status_code == 404
            codes = []
            while 409 not in codes:  # a registration that had ended before it was unloaded is no race
                assert len(codes) < 20
                adding = asyncio.create_task(client.post("/models/load", json=load))
                while (await client.post("/models/unload", json=unload)).is_error:  # as soon as it comes
                    assert not adding.done()
                codes.append((await adding).status_code)
                last = await adding
                assert codes[-1] in (200, 409), last.text
                assert (await client.get("/v1/models/twin")).status_code == 404
            assert (await client.post("/models/load", json=load)).status_code == 200
            assert (await _complete(server, GREEDY | {"model": "twin"})).done
            removes: list[Awaitable[object]] = [client.post("/models/unload", json=unload) for _ in range(2)]
            await asyncio.gather(*removes)
            assert (await client.get("/v1/models/twin")).status_code == 404

    asyncio.run(main())
    assert server.metrics().total("instance_restarts_total") == 0


async def _complete(server: Server, body: Body) -> Stream:
    stream = Stream(body)
    async with client_of(server.url) as client:
        await stream.run(client)
    return stream
