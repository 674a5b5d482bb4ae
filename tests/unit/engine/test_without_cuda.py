"""On a CPU machine nothing of CUDA is needed, and nothing of it is loaded."""

import subprocess
import sys
from pathlib import Path

SERVE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cuda"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Absent())
from pathlib import Path
import aegis.instance.process, aegis.launcher.launch
from aegis.engine.transformers_engine import TransformersEngine
from tests.unit.engine.generation import begin, step
from tests.unit.engine.images import Arena
from tests.unit.engine.test_transformers_engine import make
built = make("llama", Path(sys.argv[1]) / "llama")
arena = Arena()
engine = TransformersEngine(arena.region)
engine.attach(built.spec, built.base)
step(engine, [begin(engine, arena, built, 1, [3, 4, 5], room=9)], 3)
ours = ("aegis.device.cuda.device", "aegis.engine.gpu", "aegis.engine.triton")
print([name for name in sys.modules if name.startswith(ours)])
"""


def test_a_cpu_instance_loads_nothing_of_cuda(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
