"""The configuration file, watched: what is changed in it of models and keys is done while the server runs.

Models that are new in it are registered, those that are gone from it removed, those whose checkpoint, type, weights or
engine is another replaced; of others deadlines, priority, limits, pace and pin are changed where they are. A base is
replaced together with its adapters that the file names; where there are others it stays as it was. A model that the
file says nothing new of is not touched, whatever was done to it meanwhile. Keys are replaced together, also where only
a file that holds one has changed. A file that cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from aegis.config.config import Config, Server
from aegis.config.keyring import key_files_of, read_keyring
from aegis.core.api_keys import Keyring
from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelChange
from aegis.launcher.configured_models import sources_of
from aegis.models.sources import Source
from aegis.node.node import Node
from aegis.telemetry.logs import log

LOOK_S = 0.5
_logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None


class ConfigWatch:
    """`read` reads the whole configuration anew; with `config` the server was started."""

    def __init__(self, file: Path, read: Callable[[], Config], config: Config, node: Node) -> None:
        """The node has its keys. Raises UserError."""
        self._file = file
        self._read = read
        self._started = self._config = config
        self._sources = _by_name(config)
        self._node = node
        self._catalogue = node.catalogue
        self._key_files = key_files_of(config)
        self._stamps = self._look()

    async def run(self) -> None:
        """Runs until it is cancelled. A file that is still being written is left alone."""
        seen = self._stamps
        while True:
            await asyncio.sleep(LOOK_S)
            before, seen = seen, self._look()
            if seen == before and seen != self._stamps:
                self._stamps = seen
                await self._reload()

    def _look(self) -> dict[Path, _Stamp]:
        return {file: _stamp(file) for file in (self._file, *self._key_files)}

    async def _reload(self) -> None:
        if self._stamps[self._file] is None:  # nothing in it would mean that no model is left
            _logger.warning("the configuration stays as it was: %s %s", self._file, _why_away(self._file))
            return
        try:
            config = await asyncio.to_thread(self._read)
            self._watch_keys(key_files_of(config))
            keys = _kept_closed(self._node.keys, await asyncio.to_thread(read_keyring, config))
            sources = await asyncio.to_thread(_by_name, config)
        except UserError as error:
            _logger.warning("the configuration stays as it was: %s", error.message)
            return
        for name in sorted(_changed_sections(self._config, config) & _changed_sections(self._started, config)):
            log(_logger, logging.WARNING, "takes effect at the next start", {"section": name})
        if keys != self._node.keys:
            self._node.keys = keys
            log(_logger, logging.INFO, "keys changed", {"callers": ",".join(key.caller.name for key in keys.callers)})
            if keys.closed:
                _logger.warning("no API key is left: requests are refused until there is one, or the next start")
        before, self._sources, self._config = self._sources, {**sources}, config
        await self._apply(before, sources)

    def _watch_keys(self, files: list[Path]) -> None:
        """Before they are read, and though they may be refused: what is amiss may be mended in one of them."""
        self._key_files = files
        self._stamps = {file: self._stamps.get(file, stamp) for file, stamp in self._look().items()}

    async def _apply(self, before: Mapping[ModelId, Source], after: Mapping[ModelId, Source]) -> None:
        replaced = [model for model, source in after.items() if model in before and _is_another(before[model], source)]
        replaced = await self._that_can_be_served(replaced, before, after)
        following = self._adapters_that_follow(replaced, before, after)
        replaced += following
        leaving = [*(model for model in before if model not in after), *replaced]
        stay: set[ModelId] = set()
        for model in sorted(leaving, key=lambda model: not before[model].adapter):  # no base before its adapters
            if self._catalogue.has(model) and not await self._removed(model):
                stay.add(model)
                self._sources[model] = before[model]  # so that the next edit tries again
        for model, source in after.items():
            if model in before and model not in replaced and self._sources[model] != before[model]:
                await self._change(before[model], source)
        new = [source for model, source in after.items() if model not in before or model in replaced]
        async for source, outcome in self._catalogue.register([source for source in new if source.model not in stay]):
            if isinstance(outcome, ModelRefused):
                _logger.warning("refused %s: %s", source.model, outcome.message)
                if source.model in following:
                    del self._sources[source.model]  # so that it comes with the edit that mends its base
            else:
                log(_logger, logging.INFO, "model added", {"model": source.model})

    async def _that_can_be_served(
        self, replaced: Sequence[ModelId], before: Mapping[ModelId, Source], after: Mapping[ModelId, Source]
    ) -> list[ModelId]:
        """Those of the models to be replaced that registration does not refuse. The others go on as they are. What is
        not served now loses nothing. An adapter is tried with the base that is served, unless that is replaced, too."""
        refusals: dict[ModelId, str] = {}
        served = [after[model] for model in replaced if self._catalogue.has(model)]
        if bases := [source for source in served if not source.adapter]:
            refusals |= await self._catalogue.refusals(bases)
        new = {source.model for source in bases} - refusals.keys()
        if adapters := [each for each in served if each.adapter and not ({each.base} & new if each.base else new)]:
            refusals |= await self._catalogue.refusals(adapters)
        for model, refusal in refusals.items():
            _logger.warning("%s stays as it was: %s", model, refusal)
            self._sources[model] = before[model]  # so that the next edit tries again
        return [model for model in replaced if model not in refusals]

    def _adapters_that_follow(
        self, replaced: Sequence[ModelId], before: Mapping[ModelId, Source], after: Mapping[ModelId, Source]
    ) -> list[ModelId]:
        """Those that leave before a base that is replaced, and come again after it. None of a base whose others do not
        leave: it stays."""
        following: list[ModelId] = []
        for base in replaced:
            models = self._catalogue.models().values()
            served = [model.spec.model for model in models if model.spec.base == base]
            if all(model in before for model in served):
                following += [model for model in served if model in after and model not in replaced]
        return following

    async def _removed(self, model: ModelId) -> bool:
        try:
            await self._catalogue.remove(model)
        except UserError as error:
            _logger.warning("%s stays as it was: %s", model, error.message)
            return False
        log(_logger, logging.INFO, "model removed", {"model": model})
        return True

    async def _change(self, before: Source, after: Source) -> None:
        if self._catalogue.revise(after):
            return
        change = ModelChange(
            ttft_ns=after.slo.ttft_ns if after.slo != before.slo else None,
            tbt_ns=after.slo.tbt_ns if after.slo != before.slo else None,
            gap_ns=after.slo.gap_ns if after.slo != before.slo else None,
            priority=after.priority if after.priority != before.priority else None,
            limits=after.limits if after.limits != before.limits else None,
            pinned=after.pin if after.pin != before.pin else None,
            pace=after.pace if after.pace != before.pace else None,
        )
        try:
            await self._catalogue.change(after.model, change)
        except UserError as error:
            _logger.warning("%s stays as it was: %s", after.model, error.message)
        else:
            log(_logger, logging.INFO, "model changed", {"model": after.model})


_KEYS_OF_SERVER = dict.fromkeys(("api_key", "api_key_file", "admin_key", "admin_key_file"))


def _changed_sections(before: Config, after: Config) -> set[str]:
    """The sections that differ, among those whose changes take effect at the next start."""
    changed = set()
    for name in Config.model_fields.keys() - {"models", "sources", "slo", "api_keys"}:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, Server):
            old, new = old.model_copy(update=_KEYS_OF_SERVER), new.model_copy(update=_KEYS_OF_SERVER)
        if old != new:
            changed.add(name)
    return changed


def _kept_closed(before: Keyring, after: Keyring) -> Keyring:
    """A caller whose key was the last one and was removed is still refused. Raises UserError if a change would let this
    machine's users command because there is no admin key."""
    if before.admin and not after.admin:
        raise UserError("without an admin key any user of this machine could command; leave one, or start anew")
    return replace(after, closed=before.asks and not after.callers)


def _by_name(config: Config) -> dict[ModelId, Source]:
    return {source.model: source for source in sources_of(config, demo=False)}


def _is_another(before: Source, after: Source) -> bool:
    """Whether it is not the same model any more, rather than the same on other terms."""
    terms = {"slo": after.slo, "pin": after.pin, "priority": after.priority, "limits": after.limits}
    terms["pace"] = after.pace
    return replace(before, **terms) != after


def _stamp(file: Path) -> _Stamp:
    """Another one where the file was written or replaced; None while it is away, or empty: about to be written."""
    try:
        stat = file.stat()
    except (OSError, ValueError):  # of a name that no file can have
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat.st_size else None


def _why_away(file: Path) -> str:
    try:
        file.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "is empty"
