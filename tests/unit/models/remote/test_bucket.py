"""Checkpoints in a real bucket, as moto serves one."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.models.remote.checkpoint import RemoteCheckpoint
from tests.bucket_server import BucketServer, bucket
from tests.unit.models.remote.tiny import FILES


@pytest.fixture(scope="module")
def served() -> Iterator[BucketServer]:
    with bucket() as server:
        for name, content in FILES.items():
            server.put(f"team/tiny/{name}", content)
            server.put(f"plain/{name}", content, digest=False)
        yield server


@pytest.fixture(autouse=True)
def environment(served: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)


def remote(tmp_path: Path, source: str) -> RemoteCheckpoint:
    return RemoteCheckpoint(source, tmp_path / "cache", lambda text, within_s: None)


@pytest.mark.parametrize("prefix", ["team/tiny", "plain/"])
def test_what_a_checkpoint_needs_is_fetched_and_nothing_else(tmp_path: Path, prefix: str) -> None:
    checkpoint = remote(tmp_path, f"s3://models/{prefix}")
    checkpoint.look()
    directory = checkpoint.fetch().checkpoint.directory
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert files == {name: content for name, content in FILES.items() if not name.endswith((".py", ".bin", ".md"))}


def test_the_bucket_s_own_digest_is_believed(tmp_path: Path) -> None:
    digest = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert remote(tmp_path, "s3://models/team/tiny").look().digests == (digest,)
    assert remote(tmp_path, "s3://models/plain").look().digests == (), "it has none, and nothing was fetched"


def test_a_list_of_sums_stands_in_for_it(tmp_path: Path, served: BucketServer) -> None:
    for name, content in FILES.items():
        served.put(f"summed/{name}", content, digest=False)
    served.put("summed/SHA256SUMS", f"{'0' * 64}  model.safetensors\n".encode())
    checkpoint = remote(tmp_path, "s3://models/summed")
    checkpoint.look()
    with pytest.raises(ModelRefused, match="instead of 000000000000"):
        checkpoint.fetch()


def test_a_list_of_sums_that_is_long_is_refused(
    tmp_path: Path, served: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aegis.models.remote.bucket.LIST_BYTES_MAX", 1 << 20)
    served.put("long/config.json", b"{}")
    served.put("long/SHA256SUMS", bytes((1 << 20) + 1))
    with pytest.raises(ModelRefused, match=r"SHA256SUMS has more than 1 MiB"):
        remote(tmp_path, "s3://models/long").look()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("s3://models/none", "there is nothing under none/ in the bucket models"),
        ("s3://absent/tiny", "the bucket absent answers NoSuchBucket"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path: Path, source: str, told: str) -> None:
    with pytest.raises(ModelRefused, match=told):
        remote(tmp_path, source).look()


def test_a_key_that_climbs_out_is_refused(tmp_path: Path, served: BucketServer) -> None:
    served.put("climbing/config.json", b"{}")
    served.put("climbing/../../etc/x.json", b"{}")
    with pytest.raises(ModelRefused, match="is no file in its directory"):
        remote(tmp_path, "s3://models/climbing").look()


def test_a_bucket_that_is_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ModelRefused, match="the bucket models cannot be reached"):
        remote(tmp_path, "s3://models/team/tiny").look()


def test_without_boto3_it_is_said_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ModelRefused, match=r"needs boto3; where aegis was cloned: pip install -e '\.\[s3\]'$"):
        remote(tmp_path, "s3://models/team/tiny").look()
