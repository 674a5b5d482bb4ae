import importlib.util
from collections.abc import Callable

import pytest

from aegis.core.errors import UserError
from aegis.device.open_device import create_pool, open_device
from aegis.device.shared_events import SharedWords


def test_a_cpu_device_and_its_pool(words: SharedWords) -> None:
    pool = create_pool("cpu", (4 << 20) + 1)
    device = open_device("cpu", pool.address, words, stream_words=[3])
    assert pool.page_count * pool.page_bytes == device.page_count * device.page_bytes == 4 << 20
    assert device.stream("s").word == 3
    device.close()
    pool.close()


@pytest.mark.parametrize(
    "make", [lambda _: create_pool("tpu", 4 << 20), lambda words: open_device("tpu", "/nowhere", words)]
)
def test_an_unknown_kind_is_refused(make: Callable[[SharedWords], object], words: SharedWords) -> None:
    with pytest.raises(UserError, match="unknown kind of device 'tpu'; there are cpu and cuda"):
        make(words)


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="the CUDA bindings are installed")
def test_cuda_without_its_package_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"needs cuda-bindings; where aegis was cloned: pip install -e '\.\[cuda\]'"):
        create_pool("cuda", 4 << 20)
