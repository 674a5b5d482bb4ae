"""The steps of the Dockerfile's stage for CPUs, done in a directory and an environment of their own: nothing of this
checkout but what the Dockerfile copies is there. `make test-places` runs this."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import eventually

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "configs" / "container" / "Dockerfile").read_text().replace("\\\n", " ")
_SECONDS = 900


def steps(word: str, stage: str) -> Iterator[str]:
    """What follows the word in a stage."""
    _, _, text = DOCKERFILE.partition(f" AS {stage}\n")
    for line in text.partition("\nFROM ")[0].splitlines():
        if line.startswith(f"{word} "):
            yield line.removeprefix(f"{word} ").strip()


@pytest.mark.skipif(not os.environ.get("AEGIS_TEST_PLACES"), reason="installs everything anew; make test-places")
def test_the_image_serves(tmp_path: Path, checkpoints_dir: Path) -> None:
    work, environment = tmp_path / "work", tmp_path / "environment"
    work.mkdir()
    for copy in steps("COPY", "base"):
        *names, _ = copy.split()
        for name in names:
            whole = (ROOT / name).is_dir()
            ignored = shutil.ignore_patterns("__pycache__", "results")
            if whole:
                shutil.copytree(ROOT / name, work / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, work / name)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    variables = kept | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": "/tmp"}
    for run in [*(each for each in steps("RUN", "compiled") if each.startswith("pip ")), *steps("RUN", "cpu")]:
        run = run.replace("/wheels", str(tmp_path / "wheels"))
        subprocess.run(run, shell=True, cwd=work, env=variables, check=True, timeout=_SECONDS)
    assert list(environment.glob("lib/*/site-packages/aegis/engine/cpu/_steps.*.so"))
    shutil.rmtree(work)
    variables |= {"AEGIS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "AEGIS_PORT": "8000"}
    told = subprocess.run(["aegis", "doctor"], env=variables, check=True, capture_output=True, text=True)
    assert "launch" in told.stdout
    (entry,), (command,), (check,) = steps("ENTRYPOINT", "base"), steps("CMD", "base"), steps("HEALTHCHECK", "base")
    arguments = [*ast.literal_eval(entry), *ast.literal_eval(command), "--port", "0", "--models", str(checkpoints_dir)]
    health = ast.literal_eval(re.sub(r"^.*?CMD ", "", check))
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(arguments, env=variables, stdout=out, stderr=subprocess.STDOUT)
    try:

        def port() -> str:
            found = re.search(r" models? on http://[\d.]+:(\d+)", log.read_text())
            assert server.poll() is None, log.read_text()
            return found[1] if found else ""

        health[-1] = health[-1].replace("8000", eventually(port, "it serves", 300))
        subprocess.run(health, env=variables, check=True, timeout=30)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
