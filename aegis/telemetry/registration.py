"""The progress of the registration of a model."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.ids import ModelId


class RegisteringModel(Struct, frozen=True):
    """`root` is the checkpoint the user named, `progress` what the registrar said last. Nothing is done about a `lazy`
    one until a request wants it; `tries` to bring it have failed, the last one for the reason `refusal`."""

    root: str
    progress: str = "waiting to be read"
    lazy: bool = False
    tries: int = 0
    refusal: str = ""


class Waiting(Struct, frozen=True):
    """A model that is registered when a request wants it first."""

    model: ModelId
    root: str
