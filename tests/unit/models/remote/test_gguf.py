"""GGUF files from elsewhere: looked at by their headers, fetched, gone on with, found again, refused."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused, UserError
from aegis.models.disk_cache import DiskCache
from aegis.models.gguf.checkpoint import open_gguf
from aegis.models.remote import gguf_look
from aegis.models.remote.address import BucketAddress, HubAddress, name_of, parse
from aegis.models.remote.checkpoint import RemoteCheckpoint
from aegis.models.sources import read_sources
from tests import gguf_files
from tests.bucket_server import BucketServer, bucket
from tests.checkpoint_server import CheckpointServer, serving
from tests.registering import register

FILE = "tiny-Q8_0.gguf"
FACTORS = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
Remote = Callable[[str], RemoteCheckpoint]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a file whose configuration depends on a tensor."""
    directory = tmp_path_factory.mktemp("gguf") / "org" / "tiny"
    directory.mkdir(parents=True)
    gguf_files.write(directory / FILE, "llama", "Q8_0", rows={"rope_freqs.weight": FACTORS})
    (directory / "other-Q4_0.gguf").write_bytes(b"GGUF")
    return directory


@pytest.fixture
def web(made: Path, tmp_path: Path) -> Iterator[CheckpointServer]:
    shutil.copytree(made.parent.parent, tmp_path / "web")
    with serving(tmp_path / "web") as server:
        yield server


@pytest.fixture(scope="module")
def s3(made: Path) -> Iterator[BucketServer]:
    with bucket() as server:
        server.put(f"team/{FILE}", (made / FILE).read_bytes())
        yield server


@pytest.fixture
def remote(tmp_path: Path, web: CheckpointServer, s3: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """By its address, in which {url} is the server's."""
    for name, value in (s3.environment | {"HF_ENDPOINT": web.url}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("aegis.models.remote.http._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("aegis.models.remote.fetch_core.FIRST_WAIT_NS", 1_000_000)
    return lambda source: RemoteCheckpoint(source.format(url=web.url), tmp_path / "cache", lambda text, within_s: None)


PLACES = (f"{{url}}/org/tiny/{FILE}", f"hf://org/tiny/{FILE}", f"hf://org/tiny/{FILE}@v1", f"s3://models/team/{FILE}")


@pytest.mark.parametrize("source", PLACES)
def test_a_look_reads_the_configuration_and_a_fetch_the_file(
    remote: Remote, made: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(gguf_look, "_FIRST_BYTES", 100)
    checkpoint = remote(source)
    looked, (_, config) = checkpoint.look(), open_gguf(made / FILE)
    assert looked.checkpoint.config == config
    assert config["rope_parameters"]["long_factor"] == FACTORS
    assert looked.missing_bytes == (made / FILE).stat().st_size
    assert looked.checkpoint.gguf and looked.weights_bytes >= looked.checkpoint.gguf.served_bytes
    fetched = checkpoint.fetch()
    assert fetched.digests == (hashlib.sha256((made / FILE).read_bytes()).hexdigest(),)
    assert fetched.checkpoint.weights[0].read_bytes() == (made / FILE).read_bytes()
    assert fetched.checkpoint.gguf and fetched.checkpoint.gguf.path == fetched.checkpoint.weights[0]
    assert fetched.missing_bytes == 0


def test_a_look_takes_little_and_what_was_looked_at_is_not_asked_for_again(
    remote: Remote, web: CheckpointServer, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_look, "_FIRST_BYTES", 1024)
    remote(PLACES[0]).look()
    asked = web.asked_for(FILE)
    assert 1024 < sum(each.sent_bytes for each in asked) < (made / FILE).stat().st_size / 2
    remote(PLACES[0]).look()
    assert len(web.asked_for(FILE)) == len(asked)


def test_a_server_without_ranges_or_tags_is_read_from_the_start(
    remote: Remote, web: CheckpointServer, made: Path
) -> None:
    web.ranges = web.etags = False
    checkpoint = remote(PLACES[0])
    checkpoint.look()
    assert checkpoint.fetch().checkpoint.weights[0].read_bytes() == (made / FILE).read_bytes()


@pytest.mark.parametrize("source", PLACES[:2])
def test_a_fetch_that_breaks_off_goes_on_and_a_wrong_file_is_refused(
    remote: Remote, web: CheckpointServer, source: str
) -> None:
    checkpoint = remote(source)
    checkpoint.look()
    (web.root / "org/tiny/SHA256SUMS").write_text(f"{'0' * 64}  {FILE}\n")
    asked = len(web.asked_for(FILE))
    web.cut[FILE] = [20_000, 5_000]
    checkpoint.fetch()
    assert [each.start for each in web.asked_for(FILE)[asked:]] == [0, 20_000, 25_000]
    shutil.rmtree(checkpoint.entry)
    web.wrong.add(FILE)
    again = remote(source)
    again.look()
    with pytest.raises(ModelRefused, match=rf"^{FILE} has the sha256 \w+… instead of \w+…, fetched twice; see to its"):
        again.fetch()


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("hf://org/tiny/none.gguf", None, rf"^there is no file none.gguf; it has other-Q4_0.gguf, {FILE}$"),
        ("{url}/org/tiny/none.gguf", None, r"answers 404 to HEAD /org/tiny/none.gguf$"),
        ("hf://org/tiny", None, r"^there is no config.json, so it is not a checkpoint; it has GGUF files, .*other-Q4"),
        ("{url}/org/tiny/bad.gguf", b"GGUF\3\0\0\0" + b"\xff" * 32, r"^its header announces \d+ tensors"),
        ("{url}/org/tiny/bad.gguf", b"GGUF\3\0\0\0", r"^it is no GGUF file: it is too short$"),
        ("{url}/org/tiny/bad.gguf", b"<html>" * 30, r"^it is no GGUF file: it begins with b'<htm'$"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_stays(
    remote: Remote, web: CheckpointServer, source: str, content: bytes | None, message: str
) -> None:
    if content:
        (web.root / "org/tiny/bad.gguf").write_bytes(content)
    checkpoint = remote(source)
    with pytest.raises(ModelRefused, match=message):
        checkpoint.look()
    assert not [path for path in checkpoint.entry.rglob("*.gguf*")]


def test_a_file_cut_off_at_its_source_is_refused_when_it_is_looked_at(remote: Remote, web: CheckpointServer) -> None:
    whole = (web.root / "org/tiny" / FILE).read_bytes()
    (web.root / "org/tiny/bad.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelRefused, match="it is cut off, or its header is wrong; fetch it again"):
        remote("{url}/org/tiny/bad.gguf").look()


def test_it_is_registered_with_its_first_request_and_found_again_without_the_file(
    remote: Remote, tmp_path: Path, web: CheckpointServer
) -> None:
    (source,) = read_sources([f"{web.url}/org/tiny/{FILE}"])
    assert source.model == "tiny-Q8_0"
    cache = tmp_path / "registered"
    register_it = partial(register, source, dtype="float32", cache_dir=cache)
    assert register_it(looks=True) is None
    spec = register_it()
    assert spec and spec.note == "Q8_0 file, runs as int8"
    assert [entry.path.parent.name for entry in DiskCache(cache, None).entries()] == ["checkpoints", "images"]
    for file in (cache / "checkpoints").rglob(FILE):
        file.unlink()
    web.away = True
    assert register_it(looks=True) == spec
    local = register(read_sources([str(web.root / "org/tiny" / FILE)])[0], dtype="float32", cache_dir=tmp_path / "l")
    assert local and Path(local.image_path).read_bytes() == Path(spec.image_path).read_bytes()


def test_addresses_name_a_file() -> None:
    assert parse("hf://org/name/sub/a.b-Q4.gguf@v1") == HubAddress("org/name", "v1", "sub/a.b-Q4.gguf")
    assert parse("s3://bucket/a.gguf") == BucketAddress("bucket", "", "a.gguf")
    assert [
        name_of(parse(text)) for text in ("hf://o/n/s/a.b.gguf", "s3://bucket/p/x.gguf", "https://h/a%20b.gguf")
    ] == [
        "a.b",
        "x",
        "a b",
    ]
    for wrong in ("hf://org/name/../x.gguf", "hf://org/name/x.bin", "hf://org/name//x.gguf", "hf://org/name/.x.gguf"):
        with pytest.raises(UserError, match="expected hf://org/name"):
            parse(wrong)
