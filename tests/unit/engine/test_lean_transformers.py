"""An instance starts without torch's compiler and without distributed tensors, a checkpoint is loaded without the
compiler, and whoever wants them has them. An instance finds the names that transformers finds by itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkpoints

COMPILER = ("torch._dynamo", "torch._inductor")
HIDDEN = ("accelerate", "scipy", "sympy", "torch.distributed.tensor", *COMPILER)

SERVE = f"""
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from aegis.engine.engines import engine_class
engine = engine_class("transformers")
from tests.unit.engine.generation import begin, step
from tests.unit.engine.images import Arena
from tests.unit.engine.test_transformers_engine import make
built = make("gemma2", Path(sys.argv[1]) / "gemma2")
arena = Arena()
engine = engine(arena.region, device="cpu")
engine.attach(built.spec, built.base)
step(engine, [begin(engine, arena, built, 1, [3, 4, 5], room=9)], 3)
print([name for name in {HIDDEN} if name in sys.modules])
from aegis.models.checkpoint import open_checkpoint
from aegis.models.loading import load
load(open_checkpoint(Path(sys.argv[1]) / "stored"), "float32")
print([name for name in {COMPILER} if name in sys.modules])
import torch, transformers.utils
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
print(torch._dynamo.allow_in_graph is sys.modules["torch._dynamo"].allow_in_graph)
print(transformers.utils.is_torch_distributed_available() == torch.distributed.is_available())
from importlib.util import find_spec
print(transformers.utils.is_scipy_available() == (find_spec("scipy") is not None))
ours, path = transformers.utils.import_utils, transformers.models.__path__[0]
own = module_from_spec(PathFinder.find_spec("transformers.utils.import_utils", transformers.utils.__path__))
own.__spec__.loader.exec_module(own)
print(own.fetch__all__ is not ours.fetch__all__)
print(own.define_import_structure(path) == ours.define_import_structure(path))
"""


@pytest.mark.long
def test_what_is_never_used_is_not_imported_until_somebody_asks_for_it(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "stored", "gemma2")  # transformers imports more where it writes
    done = subprocess.run([sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n[]\n2.0\nTrue\nTrue\nTrue\nTrue\nTrue\n", 0), done.stderr
