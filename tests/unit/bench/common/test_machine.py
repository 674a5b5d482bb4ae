import os

from bench.common.machine import describe


def test_a_machine_is_described_without_names_or_paths() -> None:
    machine = describe()
    texts = (machine.cpu, machine.kernel, machine.python, machine.torch, machine.date)
    assert all(texts)
    assert not any(os.uname().nodename in text or "/" in text for text in texts)
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.memcpy_bytes_per_s > 1e7
