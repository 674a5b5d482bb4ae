"""What instances and registrars import, for the process that forks them."""

from aegis.engine.lean_transformers import import_transformers

import_transformers()

import aegis.device.cpu.device  # noqa: E402
import aegis.engine.transformers_engine  # noqa: E402
import aegis.instance.follower_rank  # noqa: E402
import aegis.instance.process  # noqa: E402
import aegis.models.registrar  # noqa: E402
import aegis.models.self_check  # noqa: E402, F401
