"""Lists that stay in order while what is in them changes."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, TypeVar

from aegis.core.ids import InstanceId

_T = TypeVar("_T", bound="tuple[Any, ...] | InstanceId")


def renew(ordered: list[_T], old: _T | None, new: _T | None) -> None:
    """Puts `new` in the place that is its own, for `old`, which was there."""
    if old is not None:
        del ordered[bisect_left(ordered, old)]
    if new is not None:
        insort(ordered, new)


def renew_in_place(ordered: list[_T], old: _T | None, new: _T | None) -> None:
    """The same as `renew`, where the new entry belongs to the place of the old one."""
    if old is not None and new is not None:
        ordered[bisect_left(ordered, old)] = new
    else:
        renew(ordered, old, new)
