"""The documentation: every page is in the index once, and every relative link leads somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aegis", "bench", "decode", "memory", "prefill", "proxy")
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_index_once() -> None:
    listed = links(ROOT / "docs" / "index.md")
    assert sorted(listed) == sorted([*(page.name for page in PAGES if page.name != "index.md"), "../README.md"])


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_extras_are_installed_from_a_clone_and_are_there() -> None:
    """No index has aegis."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES, *(ROOT / "configs").rglob("*")]
    files += [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    named = set[str]()
    for file in filter(Path.is_file, files):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"aegis-serve\[|pip install '?aegis", text), file
        named |= {extra for group in re.findall(r"'\.\[([a-z0-9,]+)\]'", text) for extra in group.split(",")}
        named |= set(re.findall(r"install_advice\([\"']([a-z0-9]+)[\"']\)", text))
    assert {"bench", "cuda", "otel", "ray", "s3", "vllm"} <= named <= extras.keys()
