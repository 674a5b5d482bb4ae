"""The settings that all tests share: one torch thread per process, no network, property tests that do not watch the
clock."""

import gc
import os
import signal
import sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, what tests start would ignore it too
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of the many processes that tests start would compile our modules
sys.dont_write_bytecode = False
KEPT = ("AEGIS_CACHE", "AEGIS_COMPILED", "AEGIS_FUZZ_CASES", "AEGIS_STRESS_SECONDS", "AEGIS_TEST_")
for name in [name for name in os.environ if name.startswith("AEGIS_") and not name.startswith(KEPT)]:
    del os.environ[name]

pytest_plugins = ["tests.long_forms", "tests.market_fixtures", "tests.schedule", "tests.shared_servers", "tests.stuck"]

from hypothesis import settings  # noqa: E402

settings.register_profile("aegis", deadline=None, print_blob=True)
settings.load_profile("aegis")


def pytest_collection_finish() -> None:
    """What is imported by now stays. The garbage collector would look through it again and again, for a tenth of the
    processor time of tests that make many objects."""
    gc.collect()
    gc.freeze()
