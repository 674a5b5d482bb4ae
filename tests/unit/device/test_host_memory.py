import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.device.cpu.device import CpuDevice
from aegis.device.host_memory import MappedFile, SharedMemory

DOUBLE = """
import ctypes, sys
from aegis.device.host_memory import MappedFile
region = MappedFile(sys.argv[1], writable=True, populate=True)
cell = ctypes.c_uint64.from_address(region.base + region.nbytes - 8)
cell.value *= 2
"""


def test_shared_memory_starts_as_zeros_and_takes_memory_as_it_is_written() -> None:
    memory = SharedMemory.create(1 << 40, "huge")
    assert os.stat(memory.path).st_blocks == 0  # noqa: PTH116 - a path below /proc
    memory.close()
    memory = SharedMemory.create(3 << 20, "small")
    region = MappedFile(memory.path, writable=True, populate=False)
    assert ctypes.string_at(region.base, 3 << 20) == bytes(3 << 20)
    region.close()
    memory.close()


def test_shared_memory_cannot_be_resized() -> None:
    memory = SharedMemory.create(1 << 20, "fixed")
    for nbytes in (0, 2 << 20):
        with pytest.raises(PermissionError):
            os.truncate(memory.path, nbytes)
    memory.close()


def test_two_processes_see_the_same_bytes() -> None:
    memory = SharedMemory.create(4 << 20, "both")
    region = MappedFile(memory.path, writable=True, populate=True)
    cell = ctypes.c_uint64.from_address(region.base + region.nbytes - 8)
    cell.value = 21
    subprocess.run([sys.executable, "-c", DOUBLE, memory.path], check=True)
    assert cell.value == 42
    region.close()
    memory.close()


def test_a_region_outlives_its_memory_object() -> None:
    memory = SharedMemory.create(1 << 20, "orphan")
    region = MappedFile(memory.path, writable=True, populate=True)
    memory.close()
    ctypes.memset(region.base, 3, region.nbytes)
    assert ctypes.string_at(region.base + 99, 2) == b"\3\3"
    region.close()


def test_a_region_larger_than_what_is_populated_at_a_time_is_one_mapping_of_the_whole(tmp_path: Path) -> None:
    memory = SharedMemory.create((33 << 20) + 4096, "large")
    region = MappedFile(memory.path, writable=True, populate=True)
    for at in range(0, region.nbytes, 1 << 20):
        ctypes.c_uint64.from_address(region.base + at).value = at
    again = MappedFile(memory.path, writable=False, populate=True)
    assert all(ctypes.c_uint64.from_address(again.base + at).value == at for at in range(0, again.nbytes, 1 << 20))
    region.close()
    again.close()
    memory.close()


def test_a_file_is_mapped_whole_and_read_only(device: CpuDevice, tmp_path: Path) -> None:
    path = tmp_path / "image.bin"
    path.write_bytes(bytes(range(256)) * 100 + b"end")
    region = device.open_host(str(path), writable=False)
    assert region.nbytes == 25603
    assert ctypes.string_at(region.base, 4) == b"\0\1\2\3"
    assert ctypes.string_at(region.base + 25600, 3) == b"end"
    assert any(f"{path}" in line and " r--s " in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_what_cannot_be_mapped_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        MappedFile(str(tmp_path / "nothing"), writable=False, populate=True)
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="empty"):
        MappedFile(str(tmp_path / "empty"), writable=False, populate=True)
