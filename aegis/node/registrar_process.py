"""The registrar's process with an engine to check models with: `python -m aegis.node.registrar_process`."""

from __future__ import annotations

import os
import sys
from typing import Any

from aegis.core.model import ModelSpec
from aegis.models import registrar


def _check(spec: ModelSpec, model: Any) -> None:
    from aegis.engine.engines import backend_of, engine_class
    from aegis.models import pooled_check, self_check

    check = pooled_check.check if spec.manifest.pooling else self_check.check
    check(spec, model, engine_class(backend_of(spec.manifest)))


if __name__ == "__main__":
    registrar.main(_check)
    sys.stderr.flush()
    os._exit(0)  # taking torch down in order takes seconds, in which a model that is registered would wait
