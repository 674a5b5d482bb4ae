import subprocess
import sys
import threading
import time

import pytest

from aegis.device.shared_events import POISON, SharedWords

LONG_NS = 60_000_000_000

ANSWER = """
import sys
from aegis.device.shared_events import SharedWords
words = SharedWords.open(sys.argv[1])
for value in range(1, 101):
    assert words.wait(0, value, timeout_ns=60_000_000_000)
    words.store(1, value)
"""


def test_words_start_at_zero_and_keep_all_64_bits(words: SharedWords) -> None:
    assert [words.load(word) for word in range(words.count)] == [0] * 16
    words.store(3, (1 << 63) + 5)
    assert [words.load(2), words.load(3), words.load(4)] == [0, (1 << 63) + 5, 0]


def test_a_word_outside_is_refused(words: SharedWords) -> None:
    with pytest.raises(IndexError):
        words.load(16)


def test_waiting_for_a_reached_value_returns_at_once(words: SharedWords) -> None:
    words.store(0, 5)
    assert words.wait(0, 5, timeout_ns=0)
    assert words.wait(0, 4, timeout_ns=0)
    assert not words.wait(0, 6, timeout_ns=0)


def test_a_wait_times_out(words: SharedWords) -> None:
    start_ns = time.monotonic_ns()
    assert not words.wait(0, 1, timeout_ns=2_000_000)
    assert time.monotonic_ns() - start_ns >= 2_000_000


def test_a_store_below_the_value_does_not_end_a_wait(words: SharedWords) -> None:
    passed: list[int] = []

    def wait() -> None:
        assert words.wait(0, 3, timeout_ns=LONG_NS)
        passed.append(words.load(0))

    thread = threading.Thread(target=wait)
    thread.start()
    for value in (1, 2, 3):
        words.store(0, value)
    thread.join()
    assert passed == [3]


def test_poison_passes_every_event(words: SharedWords) -> None:
    words.poison(0)
    assert words.wait(0, POISON, timeout_ns=0)


def test_two_processes_wait_for_each_other(words: SharedWords) -> None:
    with subprocess.Popen([sys.executable, "-c", ANSWER, words.path]) as process:
        for value in range(1, 101):
            words.store(0, value)
            assert words.wait(1, value, timeout_ns=LONG_NS)
    assert process.returncode == 0


def test_words_of_a_process_that_is_gone_cannot_be_opened() -> None:
    words = SharedWords.create(1)
    words.close()
    with pytest.raises(OSError, match="No such file"):
        SharedWords.open(words.path)
