"""Which divisions of its device an instance offers its core, by what was asked for and what there is."""

from __future__ import annotations

import logging

from aegis.core.lane_views import LanePolicy
from aegis.core.role import Role
from aegis.device.divisions import WHOLE, Shares
from aegis.device.protocol import Device
from aegis.instance.settings import InstanceSettings
from aegis.telemetry.logs import log

_logger = logging.getLogger(__name__)


def lane_shares(settings: InstanceSettings, device: Device) -> tuple[Shares, ...]:
    """`WHOLE`, and then the divisions. Where lanes were asked for and cannot be had, one line of the log says why, and
    the instance works without. A GPU that instances share is divided among them as it is: there, lanes have to be asked
    for."""
    shared = device.name != "cpu" and settings.on_device > 1
    if settings.lanes == "off" or (settings.lanes == "auto" and shared):
        return (WHOLE,)
    reason = _reason(settings, device)
    if not reason:
        return device.partitions()
    if settings.lanes != "auto":
        log(_logger, logging.WARNING, "no lanes", {"instance": settings.instance, "why": reason})
    return (WHOLE,)


def _reason(settings: InstanceSettings, device: Device) -> str:
    """Why there are none; empty if there are."""
    if settings.role is Role.PREFILL:
        return "a prefill instance runs one prompt at a time"
    if not isinstance(settings.scheduler(), LanePolicy):
        return f"the policy {settings.policy!r} runs one step at a time; least-slack and muxwise have lanes"
    if settings.ranks > 1:
        return "the ranks of an instance run the same steps in the same order"
    if settings.engine == "vllm":
        return "vLLM runs one step at a time in a process"
    if len(device.partitions()) == 1:
        return "the GPU, or its driver, makes no green contexts (CUDA 12.5 and newer)"
    return ""
