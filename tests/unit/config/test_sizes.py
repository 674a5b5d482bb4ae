"""Sizes in and out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.config.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("0.1kB", 100),
        ("64KB", 64_000),
        ("1TiB", 2**40),
        ("12B", 12),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_sizes_as_people_write_them(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "4G", "-1MiB", "1e3", "4 gib", "1.5", "0.3B", "٣MiB", "1MiB 2MiB", True, None, 1.5, []]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"is no size|whole number"):
        parse_size(text)


@given(st.integers(0, 2**50))
def test_what_is_written_reads_back_the_same(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


def test_the_largest_unit_that_fits_is_written() -> None:
    assert [format_size(n) for n in (0, 1000, 1536 * 1024, 4 << 30)] == ["0B", "1000B", "1536KiB", "4GiB"]
