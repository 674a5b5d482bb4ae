"""Binding a model, refusing it and letting go of it, with a real core, device, engine and wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from transformers import LlamaConfig

from aegis.control.progress import LoopProgress
from aegis.core.effects import StreamName
from aegis.core.events import InstanceEvent
from aegis.core.ids import InstanceId
from aegis.core.messages import AddModel, DropModel, FromInstance, ModelAdded, ModelDropped, ModelFailed
from aegis.core.model import ModelSpec
from aegis.device.cached_images import CachedImages
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.divisions import WHOLE
from aegis.device.host_memory import SharedMemory
from aegis.device.memory_executor import MemoryExecutor
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import StageBuffer
from aegis.engine.protocol import KvRegion
from aegis.engine.transformers_engine import TransformersEngine
from aegis.instance.executor import EffectExecutor
from aegis.instance.lanes import Lanes
from aegis.instance.run_worker import RunWorker
from aegis.instance.span_log import SpanLog
from aegis.process.clock import MonotonicClock
from aegis.transport.links import Hub, InstanceLink
from memory.budget import Budget
from memory.ledger import Ledger
from prefill.core import PrefillCore
from tests.unit.engine.images import Built, build

SLAB_BYTES = 2 << 20
ADDRESS_PAGES = 1 << 10


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return build(config, tmp_path_factory.mktemp("models") / "llama")


class Instance:
    """A prefill instance without its process."""

    def __init__(self, address: str) -> None:
        self.words = SharedWords.create(8)
        self.memory = SharedMemory.create(SLAB_BYTES, "kv")
        self.pool = CpuPool(16 << 20)
        self.device = CpuDevice(self.pool.address, self.words, stream_words=range(7))
        host = self.device.open_host(self.memory.path, writable=True, populate=False)
        self.images = CachedImages(self.device, self.memory.path)
        self.stage = StageBuffer(self.device, self.words, 7)
        self.memory_executor = MemoryExecutor(
            self.device, host, self.images, self.stage, slab_bytes=SLAB_BYTES, address_pages=ADDRESS_PAGES
        )
        self.engine = TransformersEngine(
            KvRegion(self.memory_executor.kv.base, self.memory_executor.kv.nbytes, SLAB_BYTES)
        )
        budget = Budget(
            pages=self.device.page_count,
            page_bytes=self.device.page_bytes,
            slab_bytes=SLAB_BYTES,
            host_slabs=1,
            instances=1,
        )
        words = {name: self.memory_executor.words[name] for name in StreamName}
        self.core = PrefillCore(InstanceId("prefill-0"), Ledger(budget, words, address_pages=ADDRESS_PAGES))
        self.link = InstanceLink(address, "prefill-0/1")
        clock = MonotonicClock()
        self.spans = SpanLog(self.core.instance, clock)
        worker = RunWorker(self.engine, clock, self.link.send, lambda: False)
        lanes = Lanes(self.device, (WHOLE,), self.engine, clock, self.link.send, self.spans, LoopProgress())
        self.executor = EffectExecutor(self.engine, self.memory_executor, self.link, worker, lanes, self.spans)

    def hear(self, event: InstanceEvent) -> None:
        """The event and all that follows from it."""
        pending = [event]
        while pending:
            pending += self.executor.perform(self.core.on(pending.pop(0), 0))
            self.core.ledger.check()

    def close(self) -> None:
        self.stage.close()
        self.images.close()
        self.device.close()
        self.pool.close()
        self.link.close()
        self.memory.close()
        self.words.close()


class Proxy:
    def __init__(self, tmp_path: Path) -> None:
        self.address = f"ipc://{tmp_path}/proxy"
        self.runner = asyncio.Runner()
        self.hub: Hub[FromInstance] = self.runner.run(self.listening())

    async def listening(self) -> Hub[FromInstance]:
        return Hub(self.address, FromInstance)

    def heard(self, count: int) -> list[FromInstance]:
        async def hear() -> list[FromInstance]:
            messages: list[FromInstance] = []
            async with asyncio.timeout(10):
                while len(messages) < count:
                    messages += (await self.hub.receive())[1]
            return messages

        return self.runner.run(hear())

    def close(self) -> None:
        self.hub.close()
        self.runner.close()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path)
    yield proxy
    proxy.close()


@pytest.fixture
def instance(proxy: Proxy) -> Iterator[Instance]:
    instance = Instance(proxy.address)
    yield instance
    instance.close()


def unbuildable(spec: ModelSpec, tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    return msgspec.structs.replace(spec, directory=str(tmp_path))


@pytest.mark.parametrize("fault", ["no configuration", "no architecture"])
def test_a_refused_model_is_reported_and_leaves_nothing(
    fault: str, llama: Built, instance: Instance, proxy: Proxy, tmp_path: Path
) -> None:
    spec = {
        "no configuration": msgspec.structs.replace(llama.spec, directory=str(tmp_path / "nothing")),
        "no architecture": unbuildable(llama.spec, tmp_path),
    }[fault]
    instance.hear(AddModel(spec))
    failed, dropped = proxy.heard(2)
    assert isinstance(failed, ModelFailed)
    assert "\n" not in failed.reason
    assert dropped == ModelDropped(spec.model)
    assert not instance.engine._prepared
    instance.hear(AddModel(llama.spec))
    assert proxy.heard(1) == [ModelAdded(llama.spec.model)]


def test_a_prepared_model_is_bound_without_opening_or_building_anything(
    llama: Built, instance: Instance, proxy: Proxy, tmp_path: Path
) -> None:
    instance.engine.prepare(llama.spec)
    vanished = msgspec.structs.replace(llama.spec, image_path=str(tmp_path / "no"), directory=str(tmp_path / "no"))
    instance.hear(AddModel(vanished))
    instance.hear(DropModel(vanished.model))
    assert proxy.heard(2) == [ModelAdded(vanished.model), ModelDropped(vanished.model)]


def test_what_was_prepared_for_another_checkpoint_of_that_name_is_not_taken(
    llama: Built, instance: Instance, proxy: Proxy, tmp_path: Path
) -> None:
    instance.engine.prepare(llama.spec)
    manifest = msgspec.structs.replace(llama.manifest, fingerprint="another")
    instance.hear(AddModel(msgspec.structs.replace(llama.spec, manifest=manifest, directory=str(tmp_path))))
    assert isinstance(proxy.heard(1)[0], ModelFailed)
