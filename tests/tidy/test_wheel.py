"""The wheel: built from a clean copy, installed into an empty environment, used from another directory."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aegis", "bench", "decode", "memory", "prefill", "proxy")
OTHERS = ("pyproject.toml", "README.md", "LICENSE")


def run(*command: object, cwd: Path) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in OTHERS:
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and, through a path file, the dependencies of this one."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    python = environment / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=environment)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=environment).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment


def test_the_wheel_holds_all_six_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {file for package in PACKAGES for file in (ROOT / package).rglob("*.py")} | {ROOT / "aegis/py.typed"}
    files |= {ROOT / "bench/report" / name for name in ("page.css", "timeline.js")}
    files |= {
        file for file in (ROOT / "proxy/http/dashboard").iterdir() if file.suffix in (".css", ".html", ".js", ".svg")
    }
    assert names == {str(file.relative_to(ROOT)) for file in files}


def test_the_command_works_from_another_directory(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "bin/aegis", "--version", cwd=tmp_path).startswith("aegis ")
    assert "aegis launch" in run(installed / "bin/aegis", "--help", cwd=tmp_path)


def test_what_is_imported_is_what_was_installed(installed: Path, tmp_path: Path) -> None:
    names = [
        *PACKAGES,
        "aegis.config.sources",
        "bench.tables.results",
        "decode.policies.weighted_round_robin",
        "memory.pages",
        "prefill.policies.grouped_fcfs",
    ]
    code = f"import {', '.join(names)}, sys; print(*[sys.modules[name].__file__ for name in {names}], sep='\\n')"
    places = run(installed / "bin/python", "-c", code, cwd=tmp_path).split()
    assert len(places) == len(names)
    assert all(Path(place).is_relative_to(installed) for place in places)
