"""The unit tests that an edit calls for."""

from __future__ import annotations

from tests.changed import ROOT, affected_tests

TESTS = sorted((ROOT / "tests" / "unit" / "memory").glob("test_*.py"))


def names(*paths: str) -> list[str]:
    return [test.name for test in affected_tests(set(paths), TESTS)]


def test_tests_of_a_module_are_those_that_import_it() -> None:
    assert "test_balloon.py" in names("memory/balloon.py")
    assert "test_bump_buffer.py" not in names("memory/balloon.py")


def test_a_changed_test_is_run_itself_and_nothing_else() -> None:
    assert names("tests/unit/memory/test_bump_buffer.py") == ["test_bump_buffer.py"]
    assert names() == []
