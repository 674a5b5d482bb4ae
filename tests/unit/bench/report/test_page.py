"""A folder as a page: what is there is shown, what is not is named, nothing is taken for markup."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.telemetry import files
from bench.report.command import report
from bench.report.folder import read
from bench.report.page import page
from bench.report.results import rows
from bench.simulate.breakdown import STAGES
from tests.unit.bench.report.made import fill, memory_report, outcome, record, served, span


class Nesting(HTMLParser):
    """Fails where an element is not closed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link", "option"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert tag == "option" or self.open.pop() == tag


def visible(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL))


def test_a_full_folder_is_one_sound_page(tmp_path: Path) -> None:
    fill(tmp_path)
    html = page(read(tmp_path))
    parser = Nesting()
    parser.feed(html)
    assert parser.open == []
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", html) and "@import" not in html and "url(" not in html
    assert html == page(read(tmp_path))


def test_names_of_files_say_what_belongs_together(tmp_path: Path) -> None:
    spans, records = [span("decode", 0, 9)], [record(1, 0, 1, 2)]
    files.write(tmp_path / "a.spans.jsonl.gz", spans)
    files.write(tmp_path / "a-spans-2.jsonl", spans)
    files.write(tmp_path / "a_records.jsonl", records)
    (tmp_path / "a.json").write_bytes(served(0.5))
    (tmp_path / "b").mkdir()
    files.write(tmp_path / "b" / "records.jsonl", records)
    files.write(tmp_path / "b" / "memory.jsonl", [memory_report(0.5)])
    (tmp_path / "c.json").write_bytes(msgspec.json.encode(memory_report(0.5)))
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "notes.txt").write_text("not read")
    folder = read(tmp_path)
    assert [(run.name, len(run.spans), len(run.records), len(run.memory)) for run in folder.runs] == [
        ("a", 2, 1, 0),
        ("b", 0, 1, 1),
        ("c", 0, 0, 1),
    ]
    assert folder.runs[0].result and folder.unknown == ("trace.json",)


@pytest.mark.parametrize("kind", ["spans.jsonl", "records.jsonl", "live.json", "fig.json", "memory.jsonl"])
def test_any_one_file_makes_a_page_that_names_what_is_missing(tmp_path: Path, kind: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    fill(full)
    (source,) = full.glob(f"*{kind}*")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / source.name).write_bytes(source.read_bytes())
    told = visible(page(read(alone)))
    has = {
        "attainment over time": kind == "records.jsonl",
        "curves over models or rates": kind == "fig.json",
        "switches": kind == "spans.jsonl",
        "utilisation": kind == "spans.jsonl",
        "use of links": kind == "spans.jsonl",
        "schedule": kind == "spans.jsonl",
        "fragmentation": kind == "memory.jsonl",
        "latency breakdown": False,
    }
    assert {what: f"No {what} of " not in told for what in has} == has


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"{", "a.json: is no JSON"),
        ("a.json", b"[" * 100_000, "a.json: is no JSON: maximum recursion depth"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: is no span"),
        ("a.jsonl", b'{"arrival_ns": 1}\n', "a.jsonl:1: is no record"),
        ("a.json", b'{"curves": [{}]}', "a.json: Object missing required field `policy`"),
        ("a.json", b'{"curves": [], "sweep": "rps"}', "a.json: Expected `object | null`, got `str`"),
        ("a.json", b'{"panels": [{"curves": [], "key": 3}]}', "a.json: Expected `str | null`, got `int`"),
        ("a.json", b'{"model_cache": 1, "devices": []}', "a.json: "),
        ("a.json", b'{"slo_attainment": "all"}', "a.json: "),
        ("a.json.gz", b"{}", "a.json.gz: is no whole gzip file"),
        ("a.txt", b"", "holds no results"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        page(read(tmp_path))
    assert said in error.value.message and "\n" not in error.value.message


def test_names_are_never_markup(tmp_path: Path) -> None:
    name = "<script>alert(1)<"
    files.write(tmp_path / f"{name}.spans.jsonl", [span("decode", 0, 9, model="</script><b>", on='"><i>')])
    files.write(tmp_path / f"{name}.records.jsonl", [record(1, 0, 1, 2, model="</script><b>")])
    html = page(read(tmp_path))
    assert "alert(1)" in html and "<script>alert" not in html and "<b>" not in html and "<i>" not in html


def test_panels_of_suites_are_shown(tmp_path: Path) -> None:
    panels = [
        {"title": "24 models", "result": {stage: 0.1 for stage in STAGES} | {"mean_s": 2.5}},
        {"title": "slabs", "result": {"shapes": {"all": {"of_held": 0.2, "of_peak": 0.31, "peak_bytes": 9}}}},
        {
            "title": "moves",
            "result": {"switches": {}, "prefetched": 0.5, "kv_copies": {"count": 1, "cdf_ms": [3.0] * 100}},
        },
    ]
    (tmp_path / "fig.json").write_bytes(msgspec.json.encode({"suite": "fig", "panels": panels}))
    told = re.sub(r"\s+", " ", visible(page(read(tmp_path))))
    assert "fig: 24 models 10.0 %" in told and "2.5 s" in told
    assert "all 20.0 % 31.0 % 9 B" in told
    assert "fig: moves, 50.0 % prefetched" in told and "KV copy 1 3 ms" in told


def test_a_curve_without_points_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"curves": [{"policy": "p", "points": []}]}')
    assert "Nothing here is the result of a single run." in page(read(tmp_path))


def test_ratios_are_to_the_first_run(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(served(0.8))
    (tmp_path / "b.json").write_bytes(served(0.4))
    told = re.sub(r"\s+", " ", visible(page(read(tmp_path))))
    assert "tokens on time 80.0 % 40.0 % 0.500 ▼" in told
    assert "TTFT, p99 200 ms 200 ms 1.000" in told


def test_a_simulations_records_and_spans_say_what_it_printed(tmp_path: Path) -> None:
    done = outcome()
    files.write(tmp_path / "sim.spans.jsonl", done.spans)
    files.write(tmp_path / "sim.records.jsonl", done.records)
    values = rows(read(tmp_path).runs, ())["sim"]
    assert values["requests"] == len(done.records) and values["switches"] == len(done.switches)
    assert values["attainment"] == pytest.approx(
        sum(each.on_time for each in done.records) / sum(each.output_tokens for each in done.records)
    )


def test_who_was_refused_has_failed_in_records_as_in_a_result(tmp_path: Path) -> None:
    ends = ("finished", "failed", "refused", "cancelled")
    records = [msgspec.structs.replace(record(at, at, 5, 9), ended=end) for at, end in enumerate(ends)]
    files.write(tmp_path / "sim.records.jsonl", records)
    assert rows(read(tmp_path).runs, ())["sim"]["failed"] == 2


def test_two_lanes_compute_no_more_than_their_device_can(tmp_path: Path) -> None:
    lanes = [span("decode", 0, 100, share=400), span("prefill", 0, 50, lane=1, share=600)]
    files.write(tmp_path / "sim.spans.jsonl", lanes)
    assert rows(read(tmp_path).runs, ())["sim"]["utilisation"] == pytest.approx(0.4 + 0.5 * 0.6)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    out = tmp_path / "page.html"
    assert report(tmp_path, out) == 0
    assert out.read_text(encoding="utf-8") == page(read(tmp_path))
    assert str(out) in capsys.readouterr().out
    with pytest.raises(UserError, match="is no folder"):
        report(out, out)
