"""How far a download from the hub is, told as text where the hub's library would draw a bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MIB = 1 << 20


def bar(report: Callable[[str], None]) -> type[Any]:
    """A `tqdm_class` that draws nothing and tells `report` of the bytes, a few times a second."""
    from huggingface_hub.utils import tqdm

    class Told(tqdm):  # type: ignore[misc]
        """The library makes several; those that count files have nothing to tell."""

        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            """The library's own would be silent where bars are switched off: nothing is drawn here."""
            super(tqdm, self).__init__(*args, **options | {"disable": False})

        def display(self, msg: object = None, pos: object = None) -> None:
            if self.unit == "B" and self.total:
                report(f"downloading, {self.n / _MIB:.0f} of {self.total / _MIB:.0f} MiB")

    return Told
