"""Environment variables that nothing reads."""

import pytest

from aegis.config.config import leaves, variable
from aegis.config.variables import mistyped


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("AEGIS_PREFIL", "AEGIS_PREFILL"),
        ("AEGIS_DEVICE_MEMROY", "AEGIS_DEVICE_MEMORY"),
        ("AEGIS_MEMORY_DEVICE", "AEGIS_DEVICE_MEMORY"),
        ("AEGIS_SERVER_PORT", "AEGIS_PORT"),
        ("AEGIS_MODEL", "AEGIS_MODELS"),
    ],
)
def test_a_variable_that_is_like_one_of_ours_is_told_with_it(name: str, meant: str) -> None:
    assert list(mistyped({name: "3"})) == [f"{name} has no effect; did you mean {meant}?"]


def test_ours_and_those_of_other_tools_are_not() -> None:
    ours = {variable(path) for path, _ in leaves()} | {"AEGIS_SLO", "AEGIS_CACHE", "AEGIS_CONFIG"}
    others = {"AEGIS_TEST_LONG", "AEGIS_STRESS_SECONDS", "AEGIS_AUTH_TOKEN", "PREFIL", "AEGIS_"}
    assert not list(mistyped(dict.fromkeys(ours | others, "3")))
