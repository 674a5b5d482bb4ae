"""The time of a change of models, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.ids import ModelId
from aegis.core.messages import SwitchDone
from aegis.core.model import ModelSpec


@dataclass(slots=True)
class Switching:
    """A change under way. `loading_ns` stays None where the model was prefetched: resident or loading when wanted."""

    model: ModelId
    wanted_ns: int
    loading_ns: int | None = None
    loaded_ns: int | None = None

    def loaded(self, now_ns: int) -> None:
        """The weights are there; only the first time counts."""
        if self.loaded_ns is None:
            self.loaded_ns = now_ns

    def done(self, now_ns: int, spec: ModelSpec, work_share: float = 1.0) -> SwitchDone:
        """The first step begins."""
        assert self.loaded_ns is not None
        copying_ns = self.wanted_ns if self.loading_ns is None else self.loading_ns
        return SwitchDone(
            self.model,
            prefetched=self.loading_ns is None,
            make_room_ns=copying_ns - self.wanted_ns,
            copy_ns=self.loaded_ns - copying_ns,
            kv_ns=now_ns - self.loaded_ns,
            nbytes=spec.manifest.image_bytes,
            work_share=work_share,
        )
