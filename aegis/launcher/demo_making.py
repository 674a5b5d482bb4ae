"""The demo market where it is not there yet: a server starts when its first models are made, and serves each of the
others once it is."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

from aegis.config.paths import refusing
from aegis.core.errors import ModelRefused, UserError
from aegis.models.cache import default_cache_dir, made
from aegis.models.sources import Source, is_checkpoint
from aegis.node.model_catalogue import Catalogue
from aegis.process.child import end_with_launcher
from aegis.telemetry.logs import log

_NICER = 10
"""What is made beside serving takes what serving leaves."""

_LOOK_S = 0.25

_logger = logging.getLogger(__name__)


async def make_first_models() -> None:
    """Returns when some of the market are there. Raises UserError."""
    from aegis.models.demo.market import WORKERS, missing_models
    from aegis.models.demo.recipes import RECIPES

    with refusing("AEGIS_CACHE", str(default_cache_dir())):  # which may have a name that is too long
        missing = missing_models(default_cache_dir())
    if len(missing) < len(RECIPES):
        return
    made(default_cache_dir())  # else the process that makes them would say so, and this one that it has
    making = await _start(missing[:WORKERS])
    try:
        if await making.wait():
            raise UserError("the demo market could not be made; the reason is above")
    finally:
        await _end(making)


def missing_of(sources: Sequence[Source]) -> list[Source]:
    """The models of the demo market that are still to be made; the market is among the sources."""
    from aegis.models.demo.market import missing_models

    missing = missing_models(default_cache_dir())
    return [source for source in sources if source.model in missing]


async def make_other_models(missing: Sequence[Source], catalogue: Catalogue) -> None:
    """Registers each when it is made; requests for it wait meanwhile. Returns when all are served or refused, or when
    they cannot be made, for which the log has the reason."""
    left = {source: catalogue.expect(source, "is being made") for source in missing}
    try:
        making = await _start([source.model for source in missing], beside=True)
    except OSError as error:  # what is served goes on
        for source in left:
            catalogue.expect_no_more(source.model)
        _tell_not_made(str(error))
        return
    saying = asyncio.create_task(making.communicate())
    try:
        while left:
            await asyncio.wait([saying], timeout=_LOOK_S)
            ended = saying.done()  # before looking: what was made last is found
            for source, unwanted in [*left.items()]:
                made = is_checkpoint(Path(source.root))
                wanted = source.model not in unwanted
                if made or not wanted:
                    del left[source]
                    catalogue.expect_no_more(source.model, comes=wanted)
                if made and wanted:
                    await _register(source, catalogue)
            if ended and left:
                said = saying.result()[1].decode(errors="replace").strip().rpartition("\n")[2]
                _tell_not_made(said.removeprefix("aegis: ") or f"its process ended with code {making.returncode}")
                return
    finally:
        for source in left:
            catalogue.expect_no_more(source.model)
        await _end(making)
        await saying


def _tell_not_made(reason: str) -> None:
    log(_logger, logging.WARNING, "the rest of the demo market is not made", {"reason": reason})


async def _register(source: Source, catalogue: Catalogue) -> None:
    async for _, outcome in catalogue.register([source]):
        if isinstance(outcome, ModelRefused):
            _logger.warning("refused %s: %s", source.model, outcome.message)
        else:
            log(_logger, logging.INFO, "model added", {"model": source.model})


async def _start(names: Sequence[str], *, beside: bool = False) -> Process:
    """In a process of its own, for it takes a minute, in which what is open wants to be attended to."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aegis.cli.main", "demo", *names),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE if beside else None,
        preexec_fn=_follow_nicely if beside else _follow,
    )


def _follow() -> None:
    end_with_launcher()
    os.setpgid(0, 0)  # Ctrl-C is for the launcher, as is what else is sent to all processes


def _follow_nicely() -> None:
    _follow()
    os.nice(_NICER)


async def _end(making: Process) -> None:
    """Models that are made already are kept."""
    if making.returncode is None:
        making.send_signal(signal.SIGINT)
        await making.wait()
