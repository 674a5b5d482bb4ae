"""Checkpoints of real servers over HTTP: listed, fetched, gone on with, refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from aegis.core.errors import ModelRefused
from aegis.models.disk_cache import evict
from aegis.models.fingerprint import fingerprint
from aegis.models.remote.checkpoint import RemoteCheckpoint
from aegis.models.remote.download import Download
from aegis.models.remote.listing import FILES_MAX, RemoteFile
from aegis.models.remote.stored import Stored
from aegis.models.remote.tar import _RangeReader
from tests.checkpoint_server import CheckpointServer, serving
from tests.unit.models.remote.tiny import FILES, SHARDED, write_files

Remote = Callable[[str], RemoteCheckpoint]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[CheckpointServer]:
    write_files(tmp_path / "web" / "org" / "tiny", FILES)
    write_files(tmp_path / "web" / "org" / "sharded", SHARDED)
    with serving(tmp_path / "web") as server:
        yield server


@pytest.fixture
def remote(tmp_path: Path, web: CheckpointServer, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """By the name of its repository, or by its address."""
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("aegis.models.remote.http._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("aegis.models.remote.fetch_core.FIRST_WAIT_NS", 1_000_000)
    return lambda source: RemoteCheckpoint(source, tmp_path / "cache", lambda text, within_s: None)


def fetched(checkpoint: RemoteCheckpoint) -> dict[str, bytes]:
    checkpoint.look()
    directory = checkpoint.fetch().checkpoint.directory
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def needed(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if not name.endswith((".py", ".bin", ".md"))}


@pytest.mark.parametrize("source", ["hf://org/tiny", "hf://org/tiny@v1", "{url}/org/tiny", "{url}/org/tiny/"])
def test_what_a_checkpoint_needs_is_fetched_and_nothing_else(
    remote: Remote, web: CheckpointServer, source: str
) -> None:
    assert fetched(remote(source.format(url=web.url))) == needed(FILES)
    assert not web.asked_for(".py") and not web.asked_for(".bin")


def test_shards_that_an_index_names_are_fetched(remote: Remote) -> None:
    files = fetched(remote("hf://org/sharded"))
    assert files == {name: content for name, content in SHARDED.items() if name != "consolidated.safetensors"}


def test_a_look_takes_no_weights_and_knows_their_digests(remote: Remote, web: CheckpointServer) -> None:
    looked = remote("hf://org/tiny").look()
    assert looked.digests == (hashlib.sha256(FILES["model.safetensors"]).hexdigest(),)
    assert looked.missing_bytes == looked.weights_bytes == len(FILES["model.safetensors"])
    assert not web.asked_for("model.safetensors")


def test_a_token_goes_to_the_hub_and_is_asked_for_where_it_lacks(
    remote: Remote, web: CheckpointServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    web.token = "secret"
    with pytest.raises(ModelRefused, match="answers 401: set HF_TOKEN"):
        remote("hf://org/tiny").look()
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetched(remote("hf://org/tiny")) == needed(FILES)


def test_a_model_or_revision_that_is_not_there_is_refused(remote: Remote, web: CheckpointServer) -> None:
    for source in ("hf://org/none", "hf://org/tiny@v9"):
        with pytest.raises(ModelRefused, match="has no such model at revision"):
            remote(source).look()
    with pytest.raises(ModelRefused, match="answers 404 to GET /none/"):
        remote(f"{web.url}/none").look()


def test_a_fetch_that_breaks_off_goes_on_from_the_byte_that_is_there(remote: Remote, web: CheckpointServer) -> None:
    web.cut["model.safetensors"] = [100_000, 50_000]
    assert fetched(remote(f"{web.url}/org/tiny")) == needed(FILES)
    assert [asked.start for asked in web.asked_for("model.safetensors")] == [0, 100_000, 150_000]


def test_a_file_that_comes_slowly_is_reported_by_the_mebibyte(
    remote: Remote, web: CheckpointServer, tmp_path: Path
) -> None:
    """Whoever waits gives up what is not heard of: each byte of a trickle would count as progress."""
    told: list[str] = []
    checkpoint = RemoteCheckpoint("hf://org/tiny", tmp_path / "cache", lambda text, within_s: told.append(text))
    checkpoint.look()
    told.clear()
    web.bytes_per_s = 0.5e6
    checkpoint.fetch()
    assert len([text for text in told if text.startswith("fetching, ")]) == 1
    big = save({"weight": np.zeros(1 << 20, np.float32)})
    (web.root / "org" / "tiny" / "model.safetensors").write_bytes(big)
    web.bytes_per_s = 4e6
    checkpoint.look()
    checkpoint.fetch()
    assert len({text for text in told if text.startswith("fetching, ")}) > 2


@pytest.mark.parametrize("source", ["hf://org/tiny", "{url}/org/tiny"])
def test_a_registry_away_mid_file_is_one_line_and_the_next_fetch_goes_on(
    remote: Remote, web: CheckpointServer, source: str
) -> None:
    checkpoint = remote(source.format(url=web.url))
    checkpoint.look()
    web.cut["model.safetensors"] = [100_000] + [0] * 20
    with pytest.raises(ModelRefused, match=r"^model\.safetensors: 127\.0\.0\.1:\d+ is away .*6 times in a row"):
        checkpoint.fetch()
    web.cut.clear()
    assert fetched(remote(source.format(url=web.url))) == needed(FILES)
    assert web.asked_for("model.safetensors")[-1].start == 100_000


def test_a_server_without_ranges_or_tags_starts_anew(remote: Remote, web: CheckpointServer) -> None:
    web.ranges = web.etags = False
    web.cut["model.safetensors"] = [100_000]
    assert fetched(remote(f"{web.url}/org/tiny")) == needed(FILES)


@pytest.mark.parametrize("source", ["hf://org/tiny", "{url}/org/tiny"])
def test_a_file_that_changed_meanwhile_is_fetched_anew(remote: Remote, web: CheckpointServer, source: str) -> None:
    checkpoint = remote(source.format(url=web.url))
    checkpoint.look()
    web.cut["model.safetensors"] = [100_000] + [0] * 20
    with pytest.raises(ModelRefused):
        checkpoint.fetch()
    web.cut.clear()
    web.asked.clear()
    other = SHARDED["model-00001-of-00002.safetensors"]
    (web.root / "org" / "tiny" / "model.safetensors").write_bytes(other)
    assert fetched(remote(source.format(url=web.url)))["model.safetensors"] == other
    assert [asked.start for asked in web.asked_for("model.safetensors")] == [0]


@pytest.mark.parametrize("changes", [True, False])
def test_a_file_that_only_a_date_tells_apart_is_gone_on_with_unless_it_changed(
    remote: Remote, web: CheckpointServer, changes: bool
) -> None:
    """It changes after the listing, so the server alone knows."""
    web.etags, web.dates = False, True
    file = web.root / "org" / "tiny" / "model.safetensors"
    os.utime(file, (1_700_000_000, 1_700_000_000))
    checkpoint = remote(f"{web.url}/org/tiny")
    checkpoint.look()
    web.cut["model.safetensors"] = [100_000] + [0] * 20
    with pytest.raises(ModelRefused):
        checkpoint.fetch()
    web.cut.clear()
    if changes:
        file.write_bytes(save({"weight": np.ones(120_000, np.float32)}))
    web.asked.clear()
    directory = checkpoint.fetch().checkpoint.directory
    assert (directory / file.name).read_bytes() == file.read_bytes()
    (asked,) = web.asked_for(file.name)
    assert asked.start == 100_000 and asked.sent_bytes == file.stat().st_size - (0 if changes else 100_000)


def test_a_wrong_byte_is_fetched_again_once_and_then_refused(remote: Remote, web: CheckpointServer) -> None:
    web.wrong.add("model.safetensors")
    with pytest.raises(ModelRefused, match=r"model\.safetensors has the sha256 .*, fetched twice"):
        fetched(remote("hf://org/tiny"))
    assert len(web.asked_for("model.safetensors")) == 2
    web.wrong.clear()
    assert fetched(remote("hf://org/tiny")) == needed(FILES)


def test_an_index_as_json_has_digests(remote: Remote, web: CheckpointServer) -> None:
    listed = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in FILES.items()
    ]
    index = web.root / "org" / "tiny" / "index.json"
    index.write_text(json.dumps({"files": listed}))
    assert fetched(remote(f"{web.url}/org/tiny/index.json")) == needed(FILES)
    listed[0]["sha256"] = "0" * 64
    index.write_text(json.dumps({"files": listed}))
    with pytest.raises(ModelRefused, match="instead of 000000000000"):
        fetched(remote(f"{web.url}/org/tiny/index.json"))
    for climbing in ("../../etc/passwd.json", "/etc/passwd.json", "..\\x.json"):
        index.write_text(json.dumps({"files": [*listed, {"name": climbing}]}))
        with pytest.raises(ModelRefused, match="is no file in its directory"):
            fetched(remote(f"{web.url}/org/tiny/index.json"))


@pytest.mark.parametrize("size", [10**400, -1, True, "5"])
def test_a_size_that_no_file_has_says_nothing(remote: Remote, web: CheckpointServer, size: object) -> None:
    folder = web.root / "org" / "tiny"
    names = ["config.json", "model.safetensors"]
    (folder / "index.json").write_text(json.dumps({"files": [{"name": name, "size": size} for name in names]}))
    assert remote(f"{web.url}/org/tiny/index.json").look().weights_bytes == len(FILES["model.safetensors"])


def test_a_list_of_sums_in_a_folder_is_believed(remote: Remote, web: CheckpointServer) -> None:
    sums = web.root / "org" / "tiny" / "SHA256SUMS"
    sums.write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(ModelRefused, match="instead of 000000000000"):
        fetched(remote(f"{web.url}/org/tiny"))
    digest = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    sums.write_text(f"{digest} *./model.safetensors\n")
    assert remote(f"{web.url}/org/tiny").look().digests == (digest,)


def test_of_a_tar_only_what_is_needed_is_fetched(remote: Remote, web: CheckpointServer) -> None:
    with tarfile.open(web.root / "tiny.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a_config.json"))  # beside its directory
        tar.add(web.root / "org" / "tiny", "tiny-1.0")
    assert fetched(remote(f"{web.url}/tiny.tar")) == needed(FILES)
    sent = sum(asked.sent_bytes for asked in web.asked)
    assert sent < len(FILES["model.safetensors"]) + (1 << 19), "not the pickled weights, too"
    web.ranges = False
    with pytest.raises(ModelRefused, match="sends no parts of files"):
        fetched(remote(f"{web.url}/tiny.tar"))


def test_what_came_of_a_file_that_its_source_has_no_more_leaves_the_disk(remote: Remote, web: CheckpointServer) -> None:
    files, name = web.root / "org" / "sharded", "model-00001-of-00002.safetensors"
    sharded = remote("hf://org/sharded")
    sharded.look()
    web.cut[name] = [100_000, *[0] * 9]
    with pytest.raises(ModelRefused, match=f"{name}: .* times in a row"):
        sharded.fetch()
    assert (sharded.entry / "partial" / name).is_file()
    for gone in (name, "model.safetensors.index.json"):
        (files / gone).unlink()
    (files / "model.safetensors").write_bytes(FILES["model.safetensors"])
    remote("hf://org/sharded").look()
    assert not (sharded.entry / "partial" / name).exists()


def test_an_embedders_image_has_its_name_also_when_the_weights_behind_it_have_left(
    remote: Remote, web: CheckpointServer
) -> None:
    write_files(web.root / "embedder", FILES | {"modules.json": b"[]"})
    write_files(web.root / "embedder" / "2_Dense", {name: FILES[name] for name in ("config.json", "model.safetensors")})
    with tarfile.open(web.root / "embedder.tar", "w") as tar:
        tar.add(web.root / "embedder", "embedder")
    embedder = remote(f"{web.url}/embedder.tar")
    embedder.look()
    looks = [embedder.fetch()]
    assert evict(embedder.entry)
    looks.append(remote(f"{web.url}/embedder.tar").look())
    assert len({fingerprint(looked.checkpoint, "auto", digests=looked.digests) for looked in looks}) == 1
    (web.root / "embedder" / "2_Dense" / "model.safetensors").write_bytes(save({"weight": np.ones(9, np.float32)}))
    with tarfile.open(web.root / "embedder.tar", "w") as tar:
        tar.add(web.root / "embedder", "embedder")
    other = remote(f"{web.url}/embedder.tar")
    other.look()
    looks.append(other.fetch())
    assert len({fingerprint(looked.checkpoint, "auto", digests=looked.digests) for looked in looks}) == 2


def test_a_file_without_a_byte_is_fetched(remote: Remote, web: CheckpointServer) -> None:
    (web.root / "org" / "tiny" / "merges.txt").write_bytes(b"")
    with tarfile.open(web.root / "tiny.tar", "w") as tar:
        tar.add(web.root / "org" / "tiny", "tiny-1.0")
    for source in ("hf://org/tiny", f"{web.url}/org/tiny", f"{web.url}/tiny.tar"):
        assert fetched(remote(source)) == needed(FILES) | {"merges.txt": b""}


def test_a_tar_that_climbs_out_is_refused_and_links_are_not_followed(remote: Remote, web: CheckpointServer) -> None:
    link = tarfile.TarInfo("tiny/extra.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(web.root / "tiny.tar", "w") as tar:
        tar.add(web.root / "org" / "tiny", "tiny")
        tar.addfile(link)
    assert fetched(remote(f"{web.url}/tiny.tar")) == needed(FILES)
    with tarfile.open(web.root / "bad.tar", "w") as tar:
        tar.add(web.root / "org" / "tiny" / "config.json", "../config.json")
    with pytest.raises(ModelRefused, match="is no file in its directory"):
        remote(f"{web.url}/bad.tar").look()


def _back(tar: tarfile.TarFile) -> None:
    """A file of a kind of its own, behind which its header comes again."""
    tar.addfile(tarfile.TarInfo("first"))
    back = tarfile.TarInfo("back")
    back.type, back.size = b"Z", -512
    tar.addfile(back)


def _long_name(tar: tarfile.TarFile) -> None:
    tar.addfile(tarfile.TarInfo("n" * (3 << 20)))


def _links(tar: tarfile.TarFile) -> None:
    link = tarfile.TarInfo("link")
    link.type = tarfile.SYMTYPE
    for _ in range(FILES_MAX + 1):
        tar.addfile(link)


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (_back, "a file in it has a negative size"),
        (_long_name, "a header of the tar has 31[0-9]{5} bytes, at most"),
        (_links, f"it has more than {FILES_MAX} files"),
    ],
)
def test_a_tar_whose_headers_are_long_or_many_or_lead_back_is_refused(
    remote: Remote, web: CheckpointServer, add: Callable[[tarfile.TarFile], None], reason: str
) -> None:
    with tarfile.open(web.root / "bad.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        add(tar)
        tar.add(web.root / "org" / "tiny", "tiny")
    with pytest.raises(ModelRefused, match=reason):
        remote(f"{web.url}/bad.tar").look()


def test_of_a_block_of_a_tar_no_more_is_read_than_was_asked_for() -> None:
    sent = []

    def endless() -> Iterator[bytes]:
        for number in range(1 << 10):
            sent.append(number)
            yield bytes(1 << 15)

    answers = httpx.MockTransport(lambda request: httpx.Response(206, content=endless()))
    with httpx.Client(transport=answers) as client:
        assert len(_RangeReader(client, "http://host/a.tar").read(512)) == 512
    assert len(sent) < 4


def test_a_server_that_sends_other_parts_is_refused(remote: Remote, web: CheckpointServer) -> None:
    with tarfile.open(web.root / "tiny.tar", "w") as tar:
        tar.add(web.root / "org" / "tiny", "tiny")
    web.cut["model.safetensors"] = [200_000]
    web.shifted = 1
    with pytest.raises(ModelRefused, match="sends another part of a file than it is asked for"):
        fetched(remote("hf://org/tiny"))
    with pytest.raises(ModelRefused, match="sends another part of a file than it is asked for"):
        fetched(remote(f"{web.url}/tiny.tar"))


def test_a_library_that_fails_in_a_way_of_its_own_ends_the_fetch_with_a_line(tmp_path: Path) -> None:
    class Expired:
        async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]:
            raise LookupError("the credentials have expired")

    async def main() -> None:
        async with httpx.AsyncClient() as client, asyncio.timeout(10):
            stored = Stored(tmp_path, "s3://bucket/a")
            await Download(Expired(), stored, client, lambda have, of: None).run([RemoteFile("config.json", "")])

    with pytest.raises(
        ModelRefused, match=r"^config\.json: LookupError while it was fetched: the credentials have exp"
    ):
        asyncio.run(main())


def test_pickled_weights_are_refused_before_anything_is_fetched(remote: Remote, web: CheckpointServer) -> None:
    (web.root / "org" / "tiny" / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"pickled \(pytorch_model.bin\)"):
        remote("hf://org/tiny").look()


def test_a_source_that_is_away_has_what_it_had(remote: Remote, web: CheckpointServer, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="in a row; try again later"):
        web.away = True
        remote("hf://org/tiny").look()
    web.away = False
    fetched(remote("hf://org/tiny"))
    web.away = True
    assert fetched(remote("hf://org/tiny")) == needed(FILES)
    stored = Stored(tmp_path / "cache", "hf://org/tiny")
    (stored.files / "model.safetensors").unlink()
    assert remote("hf://org/tiny").look().digests, "an image of it would be found"
    asked = len(web.asked)
    with pytest.raises(ModelRefused, match=r"answers 503, 4 times in a row; try again later$"):
        fetched(remote("hf://org/tiny"))
    assert len(web.asked) == asked + 4, "it is told at once what is known"


def test_an_update_that_was_only_looked_at_is_not_taken_with_the_weights_from_before(
    remote: Remote, web: CheckpointServer
) -> None:
    fetched(remote("hf://org/tiny"))
    folder = web.root / "org" / "tiny"
    (folder / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    (folder / "model.safetensors").write_bytes(save({"weight": np.ones(120_000, np.float32)}))
    remote("hf://org/tiny").look()
    web.away = True
    with pytest.raises(ModelRefused, match="in a row; try again later"):
        remote("hf://org/tiny").look()
    web.away = False
    updated = fetched(remote("hf://org/tiny"))
    web.away = True
    assert fetched(remote("hf://org/tiny")) == updated


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_update_whose_small_files_broke_off_is_not_taken_for_what_was_there_before(
    remote: Remote, web: CheckpointServer, name: str
) -> None:
    """A file that is new counts, too: it lies beside those from before."""
    fetched(remote("hf://org/tiny"))
    (web.root / "org" / "tiny" / name).write_bytes(b'{"model_type": "qwen3"}')
    (web.root / "org" / "tiny" / "tokenizer.json").write_bytes(b'{"version": "2"}')
    web.cut["tokenizer.json"] = [0] * 20
    with pytest.raises(ModelRefused, match="6 times in a row"):
        remote("hf://org/tiny").look()
    web.away = True
    with pytest.raises(ModelRefused, match="in a row; try again later"):
        remote("hf://org/tiny").look()


def test_an_update_of_which_nothing_came_leaves_what_was_there(remote: Remote, web: CheckpointServer) -> None:
    before = fetched(remote("hf://org/tiny"))
    (web.root / "org" / "tiny" / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    web.cut["config.json"] = [0] * 20
    with pytest.raises(ModelRefused, match="6 times in a row"):
        remote("hf://org/tiny").look()
    web.away = True
    assert fetched(remote("hf://org/tiny")) == before


def test_a_record_of_an_earlier_version_is_believed(remote: Remote, web: CheckpointServer, tmp_path: Path) -> None:
    fetched(remote("hf://org/tiny"))
    file = Stored(tmp_path / "cache", "hf://org/tiny").directory / "record.json"
    record = json.loads(file.read_text())
    del record["listed"]
    file.write_text(json.dumps(record))
    web.away = True
    assert fetched(remote("hf://org/tiny")) == needed(FILES)


def test_a_file_that_never_ends_is_refused_and_so_are_weights_of_unknown_size(
    remote: Remote, web: CheckpointServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.lengths = False
    with pytest.raises(ModelRefused, match=r"^model\.safetensors: its source does not say how large it is"):
        remote(f"{web.url}/org/tiny").look()
    (web.root / "org" / "tiny" / "config.json").write_bytes(bytes(3 << 20))
    monkeypatch.setattr("aegis.models.remote.listing.JSON_BYTES_MAX", 1 << 20)
    with pytest.raises(ModelRefused, match=r"^config\.json has more than 1 MiB"):
        remote(f"{web.url}/org/tiny").look()
    web.lengths = True
    with pytest.raises(ModelRefused, match=r"^config\.json has 3 MiB, at most 1 are read"):
        remote(f"{web.url}/org/tiny").look()


@pytest.mark.parametrize("lengths", [True, False])
def test_small_files_that_are_much_together_are_refused(
    remote: Remote, web: CheckpointServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lengths: bool
) -> None:
    """By their sizes before any is fetched, else as they come."""
    monkeypatch.setattr("aegis.models.remote.listing.SMALL_BYTES_MAX", 1 << 20)
    for number in range(8):
        (web.root / "org" / "tiny" / f"{number}.model").write_bytes(bytes(300_000))
    web.lengths = lengths
    for _ in range(2):
        with pytest.raises(ModelRefused, match=r"^the files beside its weights have more than 1 MiB together"):
            remote(f"{web.url}/org/tiny").look()
    assert lengths is not bool(web.asked_for(".model"))
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.model")) <= 1 << 20


def test_a_small_file_is_bounded_where_only_its_answer_says_how_large_it_is(
    remote: Remote, web: CheckpointServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aegis.models.remote.listing.JSON_BYTES_MAX", 1 << 20)
    (web.root / "org" / "tiny" / "config.json").write_bytes(bytes(3 << 20))
    web.heads = False
    with pytest.raises(ModelRefused, match=r"^config\.json has more than 1 MiB"):
        remote(f"{web.url}/org/tiny").look()


FULL = """
import resource, sys
from pathlib import Path
from aegis.core.errors import ModelRefused
from aegis.models.remote.checkpoint import RemoteCheckpoint
checkpoint = RemoteCheckpoint(sys.argv[1], Path(sys.argv[2]), lambda text, within_s: None)
checkpoint.look()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    checkpoint.fetch()
except ModelRefused as refusal:
    print(refusal.message)
"""


def test_a_full_disk_is_one_line_and_the_rest_comes_later(
    remote: Remote, web: CheckpointServer, tmp_path: Path
) -> None:
    limit = 200_000
    command = [sys.executable, "-c", FULL, f"{web.url}/org/tiny", str(tmp_path / "cache"), str(limit)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("the disk is full: ") and told.count("\n") == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert fetched(remote(f"{web.url}/org/tiny")) == needed(FILES)
    assert web.asked_for("model.safetensors")[-1].start > 0


def test_a_file_system_that_is_full_is_one_line(web: CheckpointServer, tmp_path: Path) -> None:
    directory = tmp_path / "small"
    directory.mkdir()
    mount = f"mount -t tmpfs -o size=256k tmpfs {directory}"
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*namespace, mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    command = [sys.executable, "-c", FULL, f"{web.url}/org/tiny", str(directory), "-1"]
    told = subprocess.run([*namespace, f'{mount} && exec "$@"', "sh", *command], capture_output=True, text=True)
    assert told.stdout.startswith(f"the disk is full: {directory}") and told.stdout.count("\n") == 1, told.stderr
