import os

from bench.common.machine import cpu_of, describe


def test_a_machine_is_described_without_names_or_paths() -> None:
    machine = describe()
    texts = (machine.cpu, machine.kernel, machine.python, machine.torch, machine.date)
    assert all(texts)
    assert not any(os.uname().nodename in text or "/" in text for text in texts)
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.memcpy_bytes_per_s > 1e7


def test_a_processor_without_avx_512_is_told_by_it() -> None:
    assert cpu_of("model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n") == "AMD EPYC"
    assert cpu_of("model name\t: AMD EPYC\nflags\t\t: fpu avx2\n") == "AMD EPYC without AVX-512"
    assert cpu_of("model name\t: Neoverse-N1\nFeatures\t: asimd\n") == "Neoverse-N1"
    assert cpu_of("processor\t: 0\n") == ""
