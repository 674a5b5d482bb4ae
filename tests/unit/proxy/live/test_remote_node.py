"""A node and a proxy in different processes: what one sees and asks of the other is as if they were in one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.limits import UNLIMITED, Limits
from aegis.core.model import ModelSpec, Pace, TensorEntry
from aegis.core.request import Job, KeptPrefix, Sampling
from aegis.device.image_directory import DETOKENIZER, TOKENIZER
from aegis.launcher.remote_proxy import RemoteProxy
from aegis.models.text.text_model import TextModel
from aegis.sim.faults.fake_models import make_spec
from aegis.telemetry.metrics.scrape import Family
from aegis.telemetry.registration import Waiting
from aegis.transport.links import Hub, Spoke
from aegis.transport.node_messages import (
    CancelResponse,
    Card,
    CardRemoved,
    FromProxy,
    LookUp,
    ModelWanted,
    NodeAnswer,
    NodeCall,
    NodeCallCancelled,
    Noted,
    PermitAnswer,
    PrefixFound,
    Registering,
    ResponseCancelled,
    Scraped,
    ScrapeWanted,
    ToProxy,
)
from proxy.http.responses.stored_responses import ResponseMemory
from proxy.live.remote_node import RemoteNode
from proxy.routing.events import ForeignLoad, ModelUp

WHO = "proxy-1/1"
FAMILIES = (Family("aegis:x", "X", "counter", (("aegis:x_total", '{model_name="m"}', 2.0),)),)


@dataclass
class Model:
    spec: ModelSpec
    state: str = "ready"
    detail: str = ""
    weights: str = "cached"
    created_s: int = 7
    kv_limit_tokens: int = 100
    priority: int = 0
    limits: Limits = UNLIMITED
    pace: Pace | None = None
    pinned: bool = False


@dataclass
class FakeQueries:
    """The queries of a node, as far as these tests ask them."""

    served: dict[str, Model] = field(default_factory=dict)
    ended: bool = False
    responses: ResponseMemory = field(default_factory=ResponseMemory)

    def models(self) -> Mapping[str, Model]:
        return self.served

    async def trim_memory(self, instance: str, *, timeout_s: float) -> int:
        if instance == "broken":
            raise ValueError(instance)
        raise UserError(f"no instance '{instance}' is up", status=404, param="instance", code="gone", kind="odd")

    async def keep_response(self, key: str, stored: bytes) -> None:
        await self.responses.keep(key, stored)

    async def find_response(self, key: str) -> bytes | None:
        return await self.responses.find(key)

    async def remove_response(self, key: str) -> bool:
        return await self.responses.remove(key)

    async def cancel_response(self, key: str) -> bytes | None:
        return key.encode()

    async def limit_memory(self, instance: str, nbytes: int, *, timeout_s: float) -> int:
        return nbytes + round(timeout_s)

    async def add_model(
        self, source: str, name: str | None, *, lazy: bool = False, base: str | None = None
    ) -> Model | Waiting:
        if lazy:
            return Waiting(ModelId(name or source), source)
        if source == "endless":
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True
        made = Model(replace(make_spec(9, image_pages=1, block_bytes=128), directory=source))
        self.served[made.spec.model] = made
        return made


class Pair:
    """`told` is what the node tells beside cards and answers, `heard` what the proxy says beside questions."""

    def __init__(self, directory: Path) -> None:
        self.queries = FakeQueries()
        self.told: list[ToProxy] = []
        self.heard: list[FromProxy] = []
        self._hub: Hub[FromProxy] = Hub(f"ipc://{directory}/proxies", FromProxy)
        self._spoke: Spoke[ToProxy] = Spoke(self._hub.address, WHO, ToProxy)
        self.node = RemoteNode(self._spoke, reuses=True)
        self.proxy = RemoteProxy("ipc://there", WHO, self._hub, cast(Any, self.queries))

    async def serve_node(self) -> None:
        while True:
            identity, messages = await self._hub.receive()
            assert identity == WHO
            for message in messages:
                if isinstance(message, NodeCall | NodeCallCancelled | Scraped | ResponseCancelled):
                    self.proxy.on_message(message)
                elif isinstance(message, LookUp):
                    kept = KeptPrefix(((0, 1),), 16, len(message.job.prompt)) if message.job.sent else None
                    self.proxy.deliver(PrefixFound(message.call_id, kept))
                else:
                    self.heard.append(message)

    async def serve_proxy(self) -> None:
        while True:
            for message in await self._spoke.receive():
                match message:
                    case Card() | CardRemoved() | PrefixFound() | Registering():
                        self.node.on_message(message)
                    case NodeAnswer():
                        self.node.queries.answered(message)
                    case ScrapeWanted(call_id):
                        self.node.notify(Scraped(call_id, FAMILIES))
                    case CancelResponse(call_id, key):
                        self.node.notify(ResponseCancelled(call_id, b"ended" if key == "a/r" else None))
                    case _:
                        self.told.append(message)

    async def settle(self) -> None:
        """All that was said has arrived: a question comes after it, its answer too."""
        await self.node.queries.limit_memory("a", 1, timeout_s=0)
        await self.node.opened()

    def close(self) -> None:
        self._spoke.close()
        self._hub.close()


def paired(tmp_path: Path, work: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        pair = Pair(tmp_path)
        serving = [asyncio.create_task(pair.serve_node()), asyncio.create_task(pair.serve_proxy())]
        try:
            async with asyncio.timeout(30):
                await pair.settle()
                await work(pair)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            pair.close()

    asyncio.run(main())


def test_questions_are_answered(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        answers = await asyncio.gather(*(pair.node.queries.limit_memory("a", n, timeout_s=1.0) for n in range(3)))
        assert answers == [1, 2, 3]

    paired(tmp_path, work)


def test_a_refusal_is_the_same_refusal(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        with pytest.raises(UserError) as raised:
            await pair.node.queries.trim_memory("a", timeout_s=1.0)
        error = raised.value
        assert (error.message, error.status) == ("no instance 'a' is up", 404)
        assert (error.param, error.code, error.kind) == ("instance", "gone", "odd")

    paired(tmp_path, work)


def test_a_bug_costs_the_question_and_nothing_else(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        with pytest.raises(UserError, match="failed on this request"):
            await pair.node.queries.trim_memory("broken", timeout_s=1.0)
        assert await pair.node.queries.limit_memory("a", 1, timeout_s=1.0) == 2

    paired(tmp_path, work)


def test_a_question_ends_with_who_asked_it(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        asking = asyncio.create_task(pair.node.queries.add_model("endless", None))
        await pair.settle()
        assert not pair.queries.ended
        asking.cancel()
        await pair.settle()
        assert asking.cancelled() and pair.queries.ended

    paired(tmp_path, work)


def test_models_are_seen_as_they_are(tmp_path: Path) -> None:
    spec = replace(make_spec(0, image_pages=3, block_bytes=1024), directory=str(tmp_path))
    heavy = replace(spec, manifest=replace(spec.manifest, tensors=(TensorEntry(("w",), "int8", (1,), 0, 1, False),)))
    model = Model(heavy)

    async def work(pair: Pair) -> None:
        pair.queries.served[spec.model] = model
        pair.proxy.deliver(ModelUp(heavy, 100))
        await pair.settle()
        (seen,) = pair.node.models().values()
        assert (seen.spec, seen.state, seen.kv_limit_tokens, seen.text) == (spec, "ready", 100, None)
        assert pair.told == [ModelUp(spec, 100)], "tensors are for who loads them"
        model.weights, model.detail = "disk", "it is being made again"
        pair.proxy.refresh()
        await pair.settle()
        assert (seen.weights, seen.detail) == ("disk", "it is being made again")
        del pair.queries.served[spec.model]
        pair.proxy.refresh()
        await pair.settle()
        assert pair.node.models() == {}

    paired(tmp_path, work)


def test_models_are_not_looked_through_for_each_request() -> None:
    sent: list[object] = []
    queries = FakeQueries({"m0": Model(make_spec(0, image_pages=3, block_bytes=1024))})
    link = SimpleNamespace(send=lambda _, messages: sent.extend(messages))
    proxy = RemoteProxy("ipc://there", WHO, cast(Any, link), cast(Any, queries))
    of_requests: list[ToProxy] = [PermitAnswer(1), PrefixFound(1, None), ForeignLoad(InstanceId("i"), 0, ())]
    for message in of_requests:
        proxy.deliver(message)
    assert sent == of_requests
    proxy.deliver(Registering({}))
    assert [type(message) for message in sent[3:]] == [Card, Registering]


def test_a_model_that_was_added_here_is_there_at_once(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        added = await pair.node.queries.add_model(str(tmp_path), None)
        assert not isinstance(added, Waiting)
        assert pair.node.models()[added.spec.model] is added
        assert await pair.node.queries.add_model("elsewhere", "late", lazy=True) == Waiting(
            ModelId("late"), "elsewhere"
        )

    paired(tmp_path, work)


def test_a_model_comes_even_if_who_added_it_has_left_while_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def load(directory: Path) -> None:
        begun.set()
        goes_on.wait(20)

    async def work(pair: Pair) -> None:
        monkeypatch.setattr(TextModel, "load_to_decode", load)
        adding = asyncio.create_task(pair.node.queries.add_model(str(tmp_path), None))
        await asyncio.to_thread(begun.wait, 20)
        await pair.node.queries.limit_memory("a", 1, timeout_s=0)  # the answer to who adds it has arrived
        adding.cancel()
        await asyncio.wait([adding])
        goes_on.set()
        await pair.settle()
        assert len(pair.node.models()) == 1

    paired(tmp_path, work)


def test_a_model_whose_image_has_left_the_disk_comes_when_it_is_fetched_again(tmp_path: Path) -> None:
    image = tmp_path / "image"
    spec = replace(make_spec(0, image_pages=3, block_bytes=1024), directory=str(image))

    async def work(pair: Pair) -> None:
        pair.queries.served[spec.model] = Model(spec)
        pair.proxy.refresh()
        await pair.settle()
        assert pair.node.models() == {} and pair.node.coming()[spec.model].lazy
        image.mkdir()
        pair.proxy.deliver(Registering({}))
        await pair.settle()
        assert list(pair.node.models()) == [spec.model] and pair.node.coming() == {}

    paired(tmp_path, work)


def test_an_image_that_leaves_while_it_is_read_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "image"
    image.mkdir()
    spec = replace(make_spec(0, image_pages=3, block_bytes=1024), directory=str(image))

    def leaves(directory: Path) -> None:
        directory.rmdir()
        raise FileNotFoundError(directory / "tokenizer.json")

    async def work(pair: Pair) -> None:
        monkeypatch.setattr(TextModel, "load_to_decode", leaves)
        pair.queries.served[spec.model] = Model(spec)
        pair.proxy.refresh()
        await pair.settle()
        assert pair.node.models() == {} and pair.node.coming()[spec.model].lazy
        del pair.queries.served[spec.model]
        pair.proxy.refresh()
        await pair.settle()
        assert pair.node.coming() == {}

    paired(tmp_path, work)


def _a_directory(image: Path) -> None:
    (image / DETOKENIZER).mkdir()


def _no_json(image: Path) -> None:
    (image / TOKENIZER).write_text("{")


@pytest.mark.parametrize("damage", [_a_directory, _no_json])
def test_a_model_whose_text_cannot_be_read_comes_when_it_can(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    image = tmp_path / "image"
    image.mkdir()
    damage(image)
    spec = replace(make_spec(0, image_pages=3, block_bytes=1024), directory=str(image))

    async def work(pair: Pair) -> None:
        pair.queries.served[spec.model] = Model(spec)
        pair.proxy.refresh()
        await pair.settle()
        coming = pair.node.coming()[spec.model]
        assert (coming.lazy, coming.tries) == (True, 1) and "cannot be read" in coming.refusal
        pair.node.notify(ModelWanted(spec.model))
        await pair.settle()
        assert pair.node.coming()[spec.model].tries == 2, "a request has it tried again"
        assert caplog.messages == ["model cannot be read"] * 2
        for file in image.iterdir():
            file.rmdir() if file.is_dir() else file.unlink()
        pair.proxy.deliver(Registering({}))
        await pair.settle()
        assert list(pair.node.models()) == [spec.model] and pair.node.coming() == {}

    paired(tmp_path, work)


def test_metrics_are_told_when_they_are_wanted(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        assert await pair.proxy.scrape() == FAMILIES

    paired(tmp_path, work)


def test_a_response_is_cancelled_through_the_node(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        assert await pair.proxy.cancel_response("a/r") == b"ended"
        assert await pair.proxy.cancel_response("b/r") is None
        assert await pair.node.queries.cancel_response("c/r") == b"c/r", "which asks the node"

    paired(tmp_path, work)


def test_responses_are_kept_at_the_node(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        queries = pair.node.queries
        await queries.keep_response("a/r", b"\x00 any bytes")
        assert await queries.find_response("a/r") == b"\x00 any bytes"
        assert await queries.find_response("b/r") is None
        assert [await queries.remove_response("a/r") for _ in range(2)] == [True, False]

    paired(tmp_path, work)


def test_nobody_waits_for_a_proxy_that_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        pair = Pair(tmp_path)  # and nobody listens
        scraping = asyncio.create_task(pair.proxy.scrape())
        cancelling = asyncio.create_task(pair.proxy.cancel_response("a/r"))
        await asyncio.sleep(0)
        pair.proxy.lost()
        assert await scraping == ()
        assert await cancelling is None
        pair.close()

    asyncio.run(main())


def test_nothing_is_kept_of_a_model_that_has_left(tmp_path: Path) -> None:
    spec = replace(make_spec(0, image_pages=3, block_bytes=1024), directory=str(tmp_path))

    async def work(pair: Pair) -> None:
        kept = sys.getrefcount(spec)
        pair.queries.served[spec.model] = Model(spec)
        pair.proxy.refresh()
        del pair.queries.served[spec.model]
        pair.proxy.refresh()
        await pair.settle()
        assert sys.getrefcount(spec) == kept

    paired(tmp_path, work)


def test_what_a_proxy_says_of_itself_arrives(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        note = Noted(cast(Any, "decode-0"), 3)
        pair.node.notify(note)
        await pair.settle()
        assert pair.heard == [note]

    paired(tmp_path, work)


def test_what_is_kept_of_a_prompt_is_told_to_who_asked(tmp_path: Path) -> None:
    async def work(pair: Pair) -> None:
        found: list[KeptPrefix | None] = []
        for sent in ((), (5,)):
            job = Job(RequestId(1), 1, ModelId("m"), (1, 2, 3), Sampling(max_tokens=4), 0, sent)
            pair.node.look_up(InstanceId("decode-0"), job, found.append)
        assert not found
        await pair.settle()
        assert found == [None, KeptPrefix(((0, 1),), 16, 3)]

    paired(tmp_path, work)


def test_a_node_that_keeps_nothing_is_not_asked() -> None:
    found: list[KeptPrefix | None] = []
    node = RemoteNode(cast(Any, None))
    job = Job(RequestId(1), 1, ModelId("m"), (1,), Sampling(max_tokens=4), 0)
    node.look_up(InstanceId("decode-0"), job, found.append)
    assert found == [None]
