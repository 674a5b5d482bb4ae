"""The served models, by the configuration."""

from pathlib import Path

import pytest

from aegis.config.sources import load
from aegis.core.errors import UserError
from aegis.core.limits import Limits
from aegis.core.model import Slo
from aegis.launcher.configured_models import sources_of
from aegis.models.demo.market import demo_models


def test_the_demo_market_has_the_deadlines_that_the_server_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path))
    for source in demo_models(tmp_path):
        Path(source.root).mkdir(parents=True)
        (Path(source.root) / "config.json").write_text("{}")
    served = sources_of(load({"slo": "ttft=2,tbt=0.05,gap=0.25"}, {}), demo=True)
    assert len(served) == 8 and {source.slo for source in served} == {Slo(2_000_000_000, 50_000_000, 250_000_000)}


def test_models_of_the_file_have_what_it_says_of_them(tmp_path: Path) -> None:
    file = tmp_path / "aegis.yaml"
    file.write_text(
        "slo: {tbt_ms: 50}\nmodels:\n"
        "  a: {path: a, priority: -2, slo: {ttft_ms: 3000, gap_ms: 200}, limits: {concurrent: 3}}\n"
    )
    (source,) = sources_of(load({"config": file}, {}), demo=False)
    assert (source.path, source.priority, source.limits) == (str(tmp_path / "a"), -2, Limits(concurrent=3))
    assert source.slo == Slo(3_000_000_000, 50_000_000, 200_000_000)


def test_the_pace_of_a_model_is_its_own_or_the_servers(tmp_path: Path) -> None:
    file = tmp_path / "aegis.yaml"
    file.write_text("server: {pace: smooth}\nmodels: {a: {path: a, pace: made}, b: {path: b}}\n")
    assert [source.pace for source in sources_of(load({"config": file}, {}), demo=False)] == ["made", "smooth"]
    file.write_text("models: {a: {path: a, pace: slow}}\n")
    with pytest.raises(UserError, match=r"models\.a\.pace"):
        load({"config": file}, {})


def test_a_model_may_be_at_an_address_and_lazy(tmp_path: Path) -> None:
    file = tmp_path / "aegis.yaml"
    file.write_text("models: {a: {url: 'hf://org/a@v1', lazy: true}, b: {path: b, lazy: true}}\n")
    first, second = sources_of(load({"config": file}, {}), demo=False)
    assert (first.root, first.lazy, second.root, second.lazy) == ("hf://org/a@v1", True, str(tmp_path / "b"), True)
    file.write_text("models: {a: {url: 'ftp://host/a'}}\n")
    with pytest.raises(UserError, match=r"^models\.a\.url: ftp://host/a: expected"):
        sources_of(load({"config": file}, {}), demo=False)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("circle", "Symlink loop"),
        ("a" * 300, "File name too long"),
        ("a\\0b", "embedded null byte"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_its_key(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    file = tmp_path / "aegis.yaml"
    file.write_text(f'models: {{a: {{path: "{path}"}}}}\n')
    with pytest.raises(UserError, match=rf"^models\.a\.path: [^\n]*{reason}[^\n]*$"):
        sources_of(load({"config": file}, {}), demo=False)


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    file = tmp_path / "aegis.yaml"
    file.write_text("models: {a: {path: a}}\nsources: [./a]\n")
    with pytest.raises(UserError, match="two models are named 'a'"):
        sources_of(load({"config": file}, {}), demo=False)
