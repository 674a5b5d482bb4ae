"""An edited configuration file: its keys, as the node and its proxies are told of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from msgspec.structs import replace

from aegis.config.config import Config
from aegis.config.keyring import read_keyring
from aegis.config.sources import load
from aegis.core.api_keys import Caller, Keyring
from aegis.core.ids import ModelId, ProxyId
from aegis.core.limits import Limits
from aegis.launcher import config_watch
from aegis.launcher.config_watch import ConfigWatch
from aegis.models.sources import Source
from aegis.node.catalogue.model import CatalogueModel
from aegis.sim.faults.fake_models import make_adapter
from aegis.transport.node_messages import KeysSet
from tests.unit.node.test_model_catalogue import Adding, adapter_in, while_adding
from tests.unit.node.test_node import HERE, THERE, End, Stand

ALICE, BOB = {"key": "sk-alice"}, {"file": "bob"}
LATER = ProxyId(2)


class Edited:
    """A file in a directory of its own, with the key of `bob` in another, watched for a node with two proxies."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "aegis.yaml"
        self.key_file = directory / "bob"
        self.key_file.write_text("sk-bob")
        self.write(alice=ALICE, bob=BOB)
        self.stand = Stand()
        config = self.read()
        self.node = self.stand.node
        self.node.keys = read_keyring(config)
        self.watch = ConfigWatch(self.file, self.read, config, self.node)

    def write(self, server: dict[str, Any] | None = None, **keys: dict[str, Any]) -> None:
        self.file.write_text(yaml.safe_dump({"server": {"admin_key": "boss"} | (server or {}), "api_keys": keys}))

    def read(self) -> Config:
        return load({"config": self.file}, {})

    def told(self, end: End) -> list[Keyring]:
        return [message.keys for message in end.told if isinstance(message, KeysSet)]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


def reloaded(edited: Edited) -> None:
    asyncio.run(edited.watch._reload())


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    return Edited(tmp_path)


def test_new_keys_and_limits_are_told_to_every_proxy_and_to_those_that_come(edited: Edited) -> None:
    edited.write(bob=BOB | {"limits": {"concurrent": 3}}, carol={"key": "sk-carol"})
    reloaded(edited)
    for end in (HERE, THERE):
        keys = edited.told(edited.stand.ends[end])[-1]
        assert keys.find("sk-alice") is None
        assert keys.find("sk-bob") == Caller("bob", Limits(concurrent=3))
        assert keys.find("sk-carol") == Caller("carol")
    later = End("ipc://later")
    edited.node.join(LATER, later)
    assert later.told[0] == KeysSet(edited.node.keys) and edited.node.keys.find("sk-carol")


def test_nobody_is_told_where_nothing_is_new(edited: Edited) -> None:
    before = len(edited.told(edited.stand.ends[HERE]))
    edited.write(alice=ALICE, bob=BOB, server={"port": 1234})
    reloaded(edited)
    assert len(edited.told(edited.stand.ends[HERE])) == before


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"alice": ALICE, "bob": {"key": "sk-alice"}}, "'alice' and 'bob' have the same key"),
        ({"alice": ALICE, "carol": {"file": "carol"}}, "carol cannot be read"),
        ({"alice": ALICE | {"limit": 3}}, "api_keys.alice.limit: "),
        ({"alice": ALICE, "carol": {"file": "~nobody.at.all/x"}}, "api_keys.carol.file: ~nobody.at.all/x: "),
        ({"alice": ALICE, "carol": {"file": "a\0b"}}, r"a\x00b' cannot be read: "),
        (
            {"alice": ALICE, "server": {"admin_key": None}},
            "without an admin key any user of this machine could command",
        ),
    ],
)
def test_what_cannot_be_changes_nothing_and_is_told_in_a_line(
    edited: Edited, caplog: pytest.LogCaptureFixture, keys: dict[str, Any], told: str
) -> None:
    before = edited.node.keys
    edited.write(**keys)
    reloaded(edited)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the configuration stays as it was: ") and told in line and "\n" not in line
    assert "sk-" not in line and edited.node.keys is before


def test_the_last_key_is_revoked_and_nobody_is_let_in_for_want_of_one(
    edited: Edited, caplog: pytest.LogCaptureFixture
) -> None:
    edited.write()
    reloaded(edited)
    for end in (HERE, THERE):
        keys = edited.told(edited.stand.ends[end])[-1]
        assert keys.asks and keys.find("sk-alice") is keys.find("sk-bob") is keys.find("") is None
        assert keys.find("boss") == Caller("admin", is_admin=True)
    assert "no API key is left" in caplog.text
    edited.write(server={"port": 1234})
    reloaded(edited)
    assert edited.node.keys.asks, "another edit does not open it"
    edited.write(carol={"key": "sk-carol"})
    reloaded(edited)
    assert edited.node.keys.find("sk-carol") and not edited.node.keys.closed


def test_a_server_that_never_had_a_key_needs_none_after_an_edit(edited: Edited) -> None:
    edited.node.keys = Keyring(admin=edited.node.keys.admin)
    edited.write(server={"port": 1234})
    reloaded(edited)
    assert not edited.node.keys.asks


def test_a_server_s_own_keys_take_effect_and_what_else_is_new_of_it_waits(
    edited: Edited, caplog: pytest.LogCaptureFixture
) -> None:
    waits = "takes effect at the next start"
    edited.write(server={"admin_key": "chief", "api_key": "sk-all"})
    reloaded(edited)
    assert edited.node.keys.find("chief") == Caller("admin", is_admin=True)
    assert edited.node.keys.find("sk-all") and waits not in caplog.text
    edited.write(server={"admin_key": "chief", "api_key": "sk-all", "port": 1234})
    reloaded(edited)
    assert waits in caplog.text


def test_a_change_that_is_undone_waits_for_no_start(edited: Edited, caplog: pytest.LogCaptureFixture) -> None:
    waits = "takes effect at the next start"
    for port, lines in ((1234, 1), (1234, 0), (5678, 1), (8000, 0)):
        caplog.clear()
        edited.write(alice=ALICE, bob=BOB, server={"port": port})
        reloaded(edited)
        assert caplog.text.count(waits) == lines, port


def test_a_key_s_own_file_is_watched_also_one_that_was_refused(
    edited: Edited, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config_watch, "LOOK_S", 0.001)
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        watching = asyncio.create_task(edited.watch.run())
        async with asyncio.timeout(20):
            edited.key_file.write_text("sk-robert")
            await until(lambda: edited.node.keys.find("sk-robert"))
            assert edited.node.keys.find("sk-bob") is None
            edited.write(alice=ALICE, carol={"file": "carol"})
            await until(lambda: "carol cannot be read" in caplog.text)
            (edited.file.parent / "carol").write_text("sk-carol")
            await until(lambda: edited.node.keys.find("sk-carol"))
        assert edited.node.keys.find("sk-robert") is None
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    asyncio.run(main())


def test_a_file_that_is_gone_or_emptied_changes_nothing_and_is_told_once(
    edited: Edited, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config_watch, "LOOK_S", 0.001)
    before = edited.node.keys
    stays = f"the configuration stays as it was: {edited.file} "

    async def main() -> None:
        watching = asyncio.create_task(edited.watch.run())
        async with asyncio.timeout(20):
            edited.file.unlink()
            await until(lambda: caplog.messages)
            await asyncio.sleep(0.05)
            assert caplog.messages == [f"{stays}cannot be read: No such file or directory"]
            edited.write(carol={"key": "sk-carol"})
            await until(lambda: edited.node.keys is not before)
            caplog.clear()
            edited.file.write_text("")
            await until(lambda: caplog.messages)
            await asyncio.sleep(0.05)
            assert caplog.messages == [f"{stays}is empty"]
            assert edited.node.keys.find("sk-carol")
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    asyncio.run(main())


def test_a_base_leaves_and_comes_again_with_the_adapters_of_the_file(tmp_path: Path) -> None:
    async def work(adding: Adding, watch: ConfigWatch, write: Callable[..., None]) -> None:
        models = adding.catalogue.models()
        before = dict(models)
        write("float32", "m0", "a0")
        await watch._reload()
        assert models.keys() == before.keys() == {"m0", "a0"}
        assert all(models[name] is not before[name] for name in before)

    with_adapter(tmp_path, work)


def test_a_model_whose_new_checkpoint_is_refused_goes_on_as_it_was_and_so_do_its_adapters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(adding: Adding, watch: ConfigWatch, write: Callable[..., None]) -> None:
        models = adding.catalogue.models()
        before = dict(models)
        adding.registrar.refusal = "cannot be read"
        write("float32", "m0", "a0")
        await watch._reload()
        assert models == before and caplog.messages == ["m0 stays as it was: cannot be read"]
        adding.registrar.refusal = ""
        write("float32", "m0", "a0")
        await watch._reload()
        assert models.keys() == before.keys()
        assert all(models[name] is not before[name] for name in before), "the next edit tries again"

    with_adapter(tmp_path, work)


def test_a_checkpoint_that_does_not_fit_takes_nobody_s_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(adding: Adding, watch: ConfigWatch, write: Callable[..., None]) -> None:
        before = dict(adding.catalogue.models())
        manifest = replace(adding.registrar.spec.manifest, image_bytes=1 << 40)
        adding.registrar.spec = replace(adding.registrar.spec, manifest=manifest)
        write("float32", "m0", "a0")
        await watch._reload()
        assert adding.catalogue.models() == before
        (line,) = caplog.messages
        assert line.startswith("m0 stays as it was: ") and "raise --device-memory" in line

    with_adapter(tmp_path, work)


def test_an_adapter_whose_new_checkpoint_is_refused_goes_on_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(adding: Adding, watch: ConfigWatch, write: Callable[..., None]) -> None:
        before = dict(adding.catalogue.models())
        write("auto", "m0", "a0", moved={"a0": str(tmp_path / "typo")})
        await watch._reload()
        assert adding.catalogue.models() == before
        (line,) = caplog.messages
        assert line.startswith("a0 stays as it was: ")

    with_adapter(tmp_path, work)


def test_a_base_stays_while_an_adapter_does_that_the_file_does_not_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(adding: Adding, watch: ConfigWatch, write: Callable[..., None]) -> None:
        models = adding.catalogue.models()
        await adding.catalogue.add(str(tmp_path / "adapter"), "a1", base="m0")
        before = dict(models)
        write("float32", "m0", "a0")
        await watch._reload()
        told = "m0 stays as it was: model 'm0' is the base of 'a0', 'a1'; remove those first"
        assert models == before and caplog.messages == [told]
        write("float32")
        await watch._reload()
        assert models == {name: before[name] for name in ("m0", "a1")}
        assert caplog.messages[1:] == ["m0 stays as it was: model 'm0' is the base of 'a1'; remove those first"]
        await adding.catalogue.remove("a1")
        write("auto")
        await watch._reload()
        assert not models

    with_adapter(tmp_path, work)


def with_adapter(
    directory: Path, work: Callable[[Adding, ConfigWatch, Callable[..., None]], Coroutine[Any, Any, None]]
) -> None:
    """Of a file with the base `m0` and its adapter `a0`, which are served; `write` writes it with those that are named,
    and the type of the base."""
    file = directory / "aegis.yaml"
    entries = {"m0": {"path": "checkpoint"}, "a0": {"path": adapter_in(directory), "base": "m0"}}

    def write(dtype: str, *names: str, moved: Mapping[str, str] | None = None) -> None:
        entries["m0"]["dtype"] = dtype
        places = {name: {"path": path} for name, path in (moved or {}).items()}
        file.write_text(yaml.safe_dump({"models": {name: entries[name] | places.get(name, {}) for name in names}}))

    def read() -> Config:
        return load({"config": file}, {})

    async def watched(adding: Adding, asked: asyncio.Task[CatalogueModel]) -> None:
        adding.registrar.go_on.set()
        base = (await asked).spec
        adding.registrar.of = {f"a{n}": make_adapter(n, base) for n in range(2)}
        await adding.catalogue.add(str(directory / "adapter"), "a0", base="m0")
        write("auto", "m0", "a0")
        node = SimpleNamespace(catalogue=adding.catalogue, keys=Keyring())
        await work(adding, ConfigWatch(file, read, read(), cast(Any, node)), write)

    while_adding(directory, watched)


def test_a_model_on_other_terms_is_the_same_model_and_one_of_another_type_is_not() -> None:
    before = Source(ModelId("m"), "/m")
    others = (replace(before, pace="smooth"), replace(before, priority=1, pin=True), replace(before, dtype="float32"))
    assert [config_watch._is_another(before, after) for after in others] == [False, False, True]
