"""A weight image gets to a machine that has not got it: whole or not at all, and once."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from aegis.cluster import image_transfer
from aegis.cluster.actor_messages import Opened
from aegis.cluster.image_transfer import ship
from aegis.cluster.machine_actor import ArrivingImage, MachineActor
from aegis.cluster.remote_machine import RemoteMachine
from aegis.core.ids import MachineId, ModelId
from aegis.core.model import ModelSpec
from tests import weight_images
from tests.no_free_files import no_free_files

NBYTES = (9 << 20) + 7  # more than a piece


class There(RemoteMachine):
    """Its actor is called in this process; what is sent to it begins with the `damage`."""

    def __init__(self, cache: Path, damage: bytes = b"") -> None:
        super().__init__(MachineId("there"), "node", MachineActor(), None)
        self.opened = Opened("", cache_dir=str(cache))
        self.asked: list[str] = []
        self._damage = damage

    async def call(self, method: str, *arguments: Any) -> Any:
        self.asked.append(method)
        if method == "write_image":
            name, file, at, content, checksum = arguments
            arguments = name, file, at, self._damage + content[len(self._damage) :], checksum
        return await getattr(self._actor, method)(*arguments)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the other machine."""
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "there"))
    return tmp_path / "there"


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    directory = tmp_path / "here" / "images" / "some-model"
    directory.mkdir(parents=True)
    written = weight_images.write(directory, "image", NBYTES)
    (directory / "manifest.json").write_text("{}")
    (directory / "empty").touch()
    return replace(written, directory=str(directory))


def test_all_files_come_and_only_once(there: Path, spec: ModelSpec) -> None:
    machine = There(there)
    asyncio.run(ship(spec, machine))
    here = machine.localised(spec)
    assert Path(here.image_path).is_relative_to(there) and machine.has(spec)
    for file in Path(spec.directory).iterdir():
        assert (Path(here.directory) / file.name).read_bytes() == file.read_bytes()
    assert [path.name for path in (there / "images").iterdir()] == ["some-model"]
    again = There(there)
    asyncio.run(ship(spec, again))
    assert again.asked == ["has_image"] and again.has(spec)


def test_one_of_another_checkpoint_is_replaced(there: Path, spec: ModelSpec) -> None:
    asyncio.run(ship(spec, There(there)))
    (Path(spec.directory) / "manifest.json").write_text('{"another": 1}')
    machine = There(there)
    asyncio.run(ship(spec, machine))
    assert (Path(machine.localised(spec).directory) / "manifest.json").read_text() == '{"another": 1}'


def test_one_that_was_renewed_comes_again_where_it_is_damaged(there: Path, spec: ModelSpec) -> None:
    asyncio.run(ship(spec, There(there)))
    whole = There(there)
    asyncio.run(ship(spec, whole, renewed=True))
    assert whole.asked == ["drop_damaged", "has_image"]
    here = whole.localised(spec)
    weight_images.damage(here, NBYTES - 1)
    asyncio.run(ship(spec, There(there), renewed=True))
    assert Path(here.image_path).read_bytes() == Path(spec.image_path).read_bytes()


def test_one_that_cannot_be_read_for_lack_of_files_stays(there: Path, spec: ModelSpec) -> None:
    machine = There(there)
    asyncio.run(ship(spec, machine))
    here = machine.localised(spec)
    with no_free_files(), pytest.raises(OSError, match="Too many open files"):
        ArrivingImage(there / "images", "some-model").drop_damaged(here)
    assert Path(here.image_path).exists()


def test_of_two_models_with_one_image_it_is_sent_for_the_first(there: Path, spec: ModelSpec) -> None:
    machine = There(there)

    async def both() -> None:
        await asyncio.gather(ship(spec, machine), ship(replace(spec, model=ModelId("other")), machine))

    asyncio.run(both())
    assert machine.asked.count("end_image") == 1
    assert Path(machine.localised(spec).image_path).read_bytes() == Path(spec.image_path).read_bytes()


def test_what_is_damaged_on_its_way_is_not_there(there: Path, spec: ModelSpec) -> None:
    machine = There(there, damage=b"x")
    with pytest.raises(ValueError, match="damaged on its way"):
        asyncio.run(ship(spec, machine))
    assert not machine.has(spec) and not Path(machine.localised(spec).directory).exists()


def test_when_one_piece_cannot_be_sent_no_other_goes_on(
    there: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_transfer, "_PIECE_BYTES", 1 << 20)
    unseen: list[dict[str, Any]] = []

    async def main() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
        machine = There(there, damage=b"x")
        with pytest.raises(ValueError, match="damaged on its way"):
            await ship(spec, machine)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left)
        gc.collect()
        return sum(not task.cancelled() for task in left)

    assert asyncio.run(main()) == 0 and not unseen


BROKEN_OFF = """
import sys
from pathlib import Path
from aegis.cluster.machine_actor import ArrivingImage
arriving = ArrivingImage(Path(sys.argv[1]), "another")
arriving.begin()
arriving.write("image", 0, b"x", 0x8CDC1683)
print("begun", flush=True)
sys.stdin.read()
"""


def test_what_a_machine_that_was_ended_had_of_an_image_is_removed(there: Path, spec: ModelSpec) -> None:
    images = there / "images"
    command = [sys.executable, "-c", BROKEN_OFF, str(images)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "begun\n"
        draft = images / f".another.{other.pid}.arriving"
        asyncio.run(ship(spec, There(there)))
        assert (draft / "image").read_bytes() == b"x", "it lives, and is at it"
        other.kill()
    shutil.rmtree(images / "some-model")
    asyncio.run(ship(spec, There(there)))
    assert [path.name for path in images.iterdir()] == ["some-model"]


def test_on_one_disk_nothing_is_sent(tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "here"))
    machine = There(tmp_path / "here")
    asyncio.run(ship(spec, machine))
    assert machine.asked == ["has_image"] and machine.localised(spec) is spec


def test_on_another_disk_with_the_same_paths_all_is_sent(tmp_path: Path, there: Path, spec: ModelSpec) -> None:
    machine = There(tmp_path / "here")
    asyncio.run(ship(spec, machine))
    assert machine.localised(spec) is spec and machine.has(spec)
    assert (there / "images" / "some-model" / "empty").exists()
