"""The benchmark runs, small: what it measures is for `make test-gpu` to print."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_figure_can_be_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.lab.gpu.suite", "--tiny", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    names = [figure["name"] for figure in result["figures"]]
    assert len(names) == len(set(names)) >= 15
