"""The registrar's process with an engine to check models with: `python -m aegis.runtime.registrar`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aegis.core.model import ModelSpec
from aegis.models import registrar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _check(spec: ModelSpec, model: PreTrainedModel) -> None:
    from aegis.engine.transformers_engine import TransformersEngine
    from aegis.models.selfcheck import check

    check(spec, model, TransformersEngine)


if __name__ == "__main__":
    registrar.main(_check)
