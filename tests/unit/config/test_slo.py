"""`--slo`."""

import pytest

from aegis.config.slo import parse_slo
from aegis.core.errors import UserError
from aegis.core.model import Slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=2,tbt=0.05", Slo(2_000_000_000, 50_000_000)),
        ("tbt=0.05", Slo(tbt_ns=50_000_000)),
        ("ttft=1e-6,tbt=86400", Slo(1_000, 86_400_000_000_000)),
    ],
)
def test_what_is_not_named_keeps_its_default(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft",
        "ttft=",
        "ttft=-1",
        "ttft=0",
        "tbt=0.0000009",
        "tbt=86401",
        "ttft=x",
        "tpot=1",
        "ttft=nan",
        "ttft=inf",
        "ttft=1,",
        "ttft=1,ttft=2",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--slo"):
        parse_slo(text)


def test_a_name_that_is_none_is_told_from_a_value_that_is_out_of_range() -> None:
    with pytest.raises(UserError, match=r"^--slo: 'tpot=1' sets none of ttft, tbt and gap; give seconds"):
        parse_slo("ttft=1,tpot=1")
    with pytest.raises(UserError, match=r"^--slo: 'ttft=0' is no limit from a microsecond to a day"):
        parse_slo("ttft=0,tpot=1")
