"""What a server cannot be asked, told before anything is measured."""

from __future__ import annotations

import asyncio
import os

from bench.interference.suite import Setting
from bench.serve.client import open_session
from bench.serve.models import choose, served_models

_SILENCE_S = 60.0


def refuse_unmeasurable(setting: Setting) -> None:
    """Asks the server for its models. Raises UserError, which names the option that is at fault."""
    asyncio.run(_refuse(setting))


async def _refuse(setting: Setting) -> None:
    async with open_session(os.environ.get("OPENAI_API_KEY"), silence_s=_SILENCE_S, keeps=False) as session:
        served = await served_models(session, setting.base_url.rstrip("/"))
    choose(served, [setting.model])
    if setting.other:
        choose(served, [setting.other], option="--other")
