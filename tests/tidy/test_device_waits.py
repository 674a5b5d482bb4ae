"""Nothing in the serving path waits for a whole device: neither by name nor by the driver's."""

import ast
from pathlib import Path

import pytest

from aegis.device.cuda.driver import DEVICE_WIDE

ROOT = Path(__file__).parents[2]
SERVING = ("aegis", "decode", "memory", "prefill", "proxy")
WAITING = {
    "torch.cuda.empty_cache",  # frees memory, for which the driver waits
    "torch.cuda.graph",  # waits and empties caches before it records
    "torch.cuda.ipc_collect",
    "torch.cuda.make_graphed_callables",
    "torch.cuda.synchronize",
    "torch.accelerator.synchronize",
}
LISTED = "aegis/device/cuda/driver.py"  # names the driver's calls in order to count them


def waits(tree: ast.AST) -> list[str]:
    """The waits for a device in a syntax tree: torch's functions, and the driver's calls as strings or attributes."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                dotted = ast.unparse(node)
                found += [dotted] if dotted in WAITING or name in DEVICE_WIDE else []
            case ast.Constant(value=str(text)) if text in DEVICE_WIDE:
                found.append(text)
            case ast.ImportFrom(module=str(module), names=names):
                found += [alias.name for alias in names if f"{module}.{alias.name}" in WAITING]
    return found


def test_nothing_waits_for_a_whole_device() -> None:
    files = [file for package in SERVING for file in sorted((ROOT / package).rglob("*.py"))]
    names = {file: str(file.relative_to(ROOT)) for file in files}
    found = {name: waits(ast.parse(file.read_text(encoding="utf-8"))) for file, name in names.items() if name != LISTED}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "with torch.cuda.graph(g): pass",
        "from torch.cuda import empty_cache",
        "driver('cuCtxSynchronize')",
        "api.cuMemFree(p)",
    ],
)
def test_what_waits_is_found(code: str) -> None:
    assert waits(ast.parse(code))


def test_waiting_for_one_stream_or_event_is_no_such_thing() -> None:
    assert not waits(ast.parse("event.synchronize(); driver('cuStreamSynchronize', s); graph.replay()"))
