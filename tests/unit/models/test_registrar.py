"""The registrar as a process: jobs in, one answer each, whatever happens to any of them."""

import subprocess
import sys
from pathlib import Path

import msgspec

from aegis.core.ids import ModelId
from aegis.models.registrar import Answer, Job, Progress, Refused, Registered
from aegis.models.sources import Source
from tests import checkpoints


def test_jobs_are_answered_in_order_and_a_refusal_harms_no_other(tmp_path: Path) -> None:
    good = checkpoints.write(tmp_path / "good", "llama", tokenizer=True)
    cache = str(tmp_path / "cache")
    jobs = [
        Job(Source(ModelId("bad"), path=str(tmp_path / "nowhere")), "auto", cache),
        Job(Source(ModelId("good"), path=str(good)), "auto", cache),
        Job(Source(ModelId("again"), path=str(good)), "auto", cache),
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "aegis.models.registrar"],
        input=b"".join(msgspec.json.encode(job) + b"\n" for job in jobs),
        capture_output=True,
        check=True,
    )
    answers = [msgspec.json.decode(line, type=Answer) for line in ended.stdout.splitlines()]
    final = [answer for answer in answers if not isinstance(answer, Progress)]
    assert [type(answer) for answer in final] == [Refused, Registered, Registered]
    assert final[0] == Refused(ModelId("bad"), f"{tmp_path / 'nowhere'}: no such directory")
    assert isinstance(final[1], Registered) and isinstance(final[2], Registered)
    assert final[1].spec.manifest == final[2].spec.manifest
    assert [answer.model for answer in answers if isinstance(answer, Progress)].count(ModelId("good")) >= 3
