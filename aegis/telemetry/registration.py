"""The progress of the registration of a model."""

from __future__ import annotations

from msgspec import Struct


class RegisteringModel(Struct, frozen=True):
    """`root` is the checkpoint the user named, `progress` what the registrar said last."""

    root: str
    progress: str = "waiting to be read"
