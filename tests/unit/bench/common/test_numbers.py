"""Numbers as people read them."""

import pytest

from bench.common.numbers import seconds, size


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (2e-6, "2 µs"),
        (999.4e-6, "999 µs"),
        (999.7e-6, "1 ms"),
        (0.9994, "999 ms"),
        (0.9997, "1 s"),
        (999.4, "999 s"),
        (999.7, "1,000 s"),
        (12_345.6, "12,346 s"),
    ],
)
def test_seconds_are_in_the_unit_that_fits(value: float | None, shown: str) -> None:
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1 kB"),
        (1500, "1.5 kB"),
        (999_700_000, "1 GB"),
        (999_400_000_000, "999 GB"),
        (2_000 * 10**12, "2,000 TB"),
    ],
)
def test_bytes_are_in_the_unit_that_fits(nbytes: float, shown: str) -> None:
    assert size(nbytes) == shown
