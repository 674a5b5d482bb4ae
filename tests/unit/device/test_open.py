import importlib.util

import pytest

from aegis.core.errors import UserError
from aegis.device.open import open_device
from aegis.device.shared_words import SharedWords


def test_a_cpu_device(words: SharedWords) -> None:
    device = open_device("cpu", 4 << 20, words, stream_words=[3])
    assert device.page_count * device.page_bytes == 4 << 20
    assert device.stream("s").word == 3
    device.close()


def test_an_unknown_kind_is_refused(words: SharedWords) -> None:
    with pytest.raises(UserError, match="unknown kind of device 'tpu'; there are cpu and cuda"):
        open_device("tpu", 4 << 20, words)


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="the CUDA bindings are installed")
def test_cuda_without_its_package_says_what_to_install(words: SharedWords) -> None:
    with pytest.raises(UserError, match="pip install cuda-bindings"):
        open_device("cuda", 4 << 20, words)
