"""Modules that are built before an instance is forked are those that it would have built."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from aegis.core.errors import ModelRefused
from aegis.engine import modules
from aegis.node.instance_processes import build_before, environment_for
from aegis.process.forked_processes import ForkServer
from tests.unit.engine.generation import begin, step
from tests.unit.engine.test_transformers_engine import ARCHITECTURES, NEW_TOKENS, attached, make, prompts

ROOT = Path(__file__).parents[3]
WITHIN_S = 120.0
SAYS = """
import json, os, sys
from pathlib import Path
modules = sys.modules["aegis.engine.modules"]  # it was imported before the fork
import torch
directories = [Path(directory).parent.name for directory, _ in modules._ahead]
print(json.dumps([directories, torch.get_num_threads(), len(os.listdir("/proc/self/task"))]))
"""


def test_an_engine_takes_what_was_built_before_once(tmp_path: Path) -> None:
    model = make("llama", tmp_path / "llama")
    modules.build_ahead(msgspec.msgpack.encode(model.spec))
    engine, arena = attached(model)
    assert modules.built_ahead(model.spec) is None
    run = begin(engine, arena, model, 0, prompts(1)[0], room=NEW_TOKENS)
    step(engine, [run], NEW_TOKENS - 1)
    assert run.ids == model.greedy(run.prompt, NEW_TOKENS)


def test_what_cannot_be_built_is_refused_and_not_there(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(make("llama", tmp_path / "llama").spec, directory=str(tmp_path / "none"))
    with pytest.raises(ModelRefused):
        modules.build_ahead(msgspec.msgpack.encode(spec))
    assert modules.built_ahead(spec) is None


@pytest.mark.long
def test_instances_are_still_forked_when_every_architecture_was_built(tmp_path: Path) -> None:
    """Building one in a process with a second thread, or starting one, would end that."""
    specs = [make(name, tmp_path / name).spec for name in ARCHITECTURES]
    (tmp_path / "says_what_is_built.py").write_text(SAYS)
    environment = {**environment_for(1), "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "2"}

    async def main(server: ForkServer, out: int) -> int:
        for spec in specs:
            build_before(server, spec)
        async with asyncio.timeout(WITHIN_S):
            child = await server.start("says_what_is_built", environment={}, stdin=b"", stdout=out)
            return await child.wait()

    with closing(ForkServer(["aegis.node.preload"], environment)) as server, (tmp_path / "out").open("w+b") as out:
        assert asyncio.run(main(server, out.fileno())) == 0
        out.seek(0)
        assert json.load(out) == [list(ARCHITECTURES), 2, 1]
