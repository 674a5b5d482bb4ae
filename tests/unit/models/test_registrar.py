"""The registrar as a process: jobs in, one answer each, whatever happens to any of them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from aegis.core.ids import ModelId
from aegis.models.registrar import Answer, Job, Progress, Refused, Registered
from aegis.models.sources import Source
from aegis.models.terms import Terms
from tests import checkpoints


def ran(jobs: Sequence[Job]) -> list[Answer]:
    ended = subprocess.run(
        [sys.executable, "-m", "aegis.models.registrar"],
        input=b"".join(msgspec.json.encode(job) + b"\n" for job in jobs),
        capture_output=True,
        check=True,
    )
    return [msgspec.json.decode(line, type=Answer) for line in ended.stdout.splitlines()]


def finals(answers: Sequence[Answer]) -> list[Registered | Refused]:
    return [answer for answer in answers if not isinstance(answer, Progress)]


def test_jobs_are_answered_in_order_and_a_refusal_harms_no_other(tmp_path: Path) -> None:
    good = checkpoints.write(tmp_path / "good", "llama", tokenizer=True)
    cache = str(tmp_path / "cache")
    jobs = [
        Job(Source(ModelId("bad"), path=str(tmp_path / "nowhere")), Terms(cache, "auto")),
        Job(Source(ModelId("good"), path=str(good)), Terms(cache, "auto")),
        Job(Source(ModelId("again"), path=str(good)), Terms(cache, "auto")),
    ]
    answers = ran(jobs)
    final = finals(answers)
    assert [type(answer) for answer in final] == [Refused, Registered, Registered]
    assert final[0] == Refused(ModelId("bad"), f"{tmp_path / 'nowhere'}: no such directory")
    assert isinstance(final[1], Registered) and isinstance(final[2], Registered)
    assert final[1].spec.manifest == final[2].spec.manifest
    assert [answer.model for answer in answers if isinstance(answer, Progress)].count(ModelId("good")) >= 3
    assert all(answer.within_s > 0 for answer in answers if isinstance(answer, Progress))


def test_it_ends_without_a_word_when_nobody_reads_its_answers_any_more(tmp_path: Path) -> None:
    job = Job(Source(ModelId("bad"), path=str(tmp_path / "nowhere")), Terms(str(tmp_path / "cache"), "auto"))
    command = [sys.executable, "-m", "aegis.models.registrar"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as registrar:
        assert registrar.stdin and registrar.stdout and registrar.stderr
        registrar.stdout.close()
        registrar.stdin.write(msgspec.json.encode(job) + b"\n")
        registrar.stdin.close()
        assert (registrar.wait(60), registrar.stderr.read()) == (0, b"")


@pytest.mark.long
def test_a_checkpoint_that_takes_all_memory_is_refused_and_the_next_is_registered(tmp_path: Path) -> None:
    """Some 10 GB, which this machine may have. torch makes what a checkpoint lacks, as large as its configuration says,
    before anybody misses it."""
    in_python, in_torch, good = (
        checkpoints.write(tmp_path / name, "llama", tokenizer=True) for name in ("python", "torch", "good")
    )
    (in_python / "chat_template.jinja").write_text("{{ [0] * 10 ** 9 }}")
    config = json.loads((in_torch / "config.json").read_text())
    (in_torch / "config.json").write_text(json.dumps(config | {"vocab_size": 10**5, "hidden_size": 25_600}))
    jobs = [
        Job(Source(ModelId(at.name), path=str(at)), Terms(str(tmp_path / "c"), "auto"))
        for at in (in_python, in_torch, good)
    ]
    python, torch, last = finals(ran(jobs))
    assert python == Refused(ModelId("python"), f"{in_python}: its chat template cannot be rendered (MemoryError)")
    assert isinstance(torch, Refused) and f"{in_torch}: registering it takes more memory than the " in torch.reason
    assert isinstance(last, Registered)
