"""The real client against a hub on loopback: layouts, faults, interruptions, several workers at once."""

from __future__ import annotations

import io
import json
import logging
from multiprocessing import get_context
import os
from pathlib import Path
import shutil
import signal
import stat
import tarfile
import time
from types import SimpleNamespace
import zipfile

import pytest

from paravt.data import catalogue, hub, transfer
from paravt.data.archives import ArchiveError
from paravt.data.hub import Hub, HubError, fetch_benchmark, fetch_benchmarks
from paravt.data.media import MediaStore, read_manifest, resolve_media, sha256_of, write_manifest
from paravt.data.published import SOURCES, Source
from paravt.weights import WeightsError, real_folder
from tests.hub_server import STRANGER, TOKEN, Fault, HubServer, Repository
from tests.miniature import build, write_zip

VIDEO = os.urandom(40_000)
SMALL = b'{"rows": 1}\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """No token of this machine, and the pause that the client's own downloader makes cut short."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(
        "huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda s: None, time=time.time)
    )
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> list[Repository]:
    return build(tmp_path_factory.mktemp("published"))


@pytest.fixture
def serve(monkeypatch):
    """Start a hub over repositories and point the client at it."""
    running = []

    def start(repositories, **options) -> HubServer:
        server = HubServer(repositories, **options).__enter__()
        running.append(server)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        return server

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture
def plain(tmp_path, serve) -> HubServer:
    """One repository with a large file, a small one, and a zip of three members."""
    folder = tmp_path / "served"
    (folder / "videos").mkdir(parents=True)
    (folder / "videos" / "a b%20é.mp4").write_bytes(VIDEO)
    (folder / "table.json").write_bytes(SMALL)
    write_zip(folder / "packed" / "one.zip", {f"in/{n}.mp4": bytes([n]) * 9000 for n in range(3)})
    return serve([Repository("o/n", folder)])


def files_of(root: Path, wanted=None, archives=("*.zip",), files=("videos/*",), **options):
    with Hub(root, wait_s=0.01, **options) as opened:
        held = opened.catalogue(opened.open("o/n"), archives, files)
        return opened.fetch_media(held, held.paths if wanted is None else wanted), held


def test_the_published_layouts_arrive_and_a_second_run_asks_for_no_content(
    published, serve, tmp_path, monkeypatch
):
    server = serve(published, page_size=2)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    media = fetch_benchmarks(list(SOURCES), tmp_path / "tables", tmp_path / "root")
    found = {
        source.name: [f.path for f in media if f.repository == source.repository]
        for source in SOURCES.values()
    }
    assert [path for path in found["videomme"] if path.endswith(".srt")] and len(found["videomme"]) == 7
    assert found["longvideobench"] == sorted(
        [f"videos/lV{n}dE-fG7hI.mp4" for n in range(3)]
        + [f"subtitles/lV{n}dE-fG7hI_en.json" for n in range(3)]
    )
    assert found["mmvu"] == [f"videos/Art/{n}.mp4" for n in range(3)]
    assert found["charades"] == [f"Charades_v1_480/AB{n}2C.mp4" for n in range(3)]
    for file in media:
        place = resolve_media(tmp_path / "root", file.repository, file.path)
        assert sha256_of(place.resolve()) == sha256_of(place) == file.sha256
        assert place.stat().st_size == file.size
    assert (tmp_path / "tables/lmms-lab__Video-MME/videomme/test-00000-of-00001.parquet").is_file()
    assert not list((tmp_path / "root/parts").iterdir())  # nothing is left half done
    server.requests.clear()
    again = fetch_benchmarks(list(SOURCES), tmp_path / "tables", tmp_path / "root")
    assert again == media
    assert {request.path.split("/")[0] for request in server.requests} == {"api"}
    assert not any(request.token != TOKEN for request in server.requests)


def test_the_token_does_not_leave_for_the_content_network(published, serve, tmp_path, monkeypatch):
    server = serve(published)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch_benchmarks(["longvideobench"], tmp_path / "tables", tmp_path / "root")
    content = [request for request in server.requests if request.server == "content"]
    assert content and all(request.token is None for request in content)


def test_a_row_limit_brings_less_and_a_smaller_one_deletes_nothing(published, serve, tmp_path):
    serve(published)
    root = tmp_path / "root"
    limited = fetch_benchmarks(["mmvu"], tmp_path / "tables", root, rows=1)
    assert [file.path for file in limited] == ["videos/Art/0.mp4"]
    everything = fetch_benchmarks(["mmvu"], tmp_path / "tables", root)
    fetch_benchmarks(["mmvu"], tmp_path / "tables", root, rows=1)
    assert all(MediaStore(root).lacks(file) is None for file in everything)


@pytest.mark.parametrize(
    "fault", [Fault("drop", after=10_000), Fault("short"), Fault("status", code=503, times=2)]
)
def test_a_broken_transfer_goes_on_where_it_stood(plain, tmp_path, fault):
    plain.fail("videos/", fault)
    [file], _ = files_of(tmp_path / "root", archives=())
    assert resolve_media(tmp_path / "root", "o/n", file.path).read_bytes() == VIDEO
    ranges = [request.range for request in plain.requests if request.server == "content"]
    assert len(ranges) > 1
    if fault.kind == "drop":
        assert ranges[1] == "bytes=10000-"


def test_a_killed_download_is_taken_up_by_the_next_process(plain, tmp_path):
    store = MediaStore(tmp_path / "root")
    key = plain.repositories[0].entries["videos/a b%20é.mp4"].etag
    store.part(key).write_bytes(VIDEO[:12_345])
    files_of(tmp_path / "root", archives=())
    assert [request.range for request in plain.requests if request.server == "content"] == ["bytes=12345-"]


def test_a_corrupt_file_is_asked_for_once_more_and_never_shown(plain, tmp_path):
    plain.fail("videos/", Fault("corrupt"))
    [file], _ = files_of(tmp_path / "root", archives=())
    assert resolve_media(tmp_path / "root", "o/n", file.path).read_bytes() == VIDEO
    plain.fail("videos/", Fault("corrupt", times=2))
    with pytest.raises(HubError, match=r"arrived twice with a checksum that is not the hub's"):
        files_of(tmp_path / "other", archives=())
    assert not resolve_media(tmp_path / "other", "o/n", file.path).exists()


def test_small_files_are_checked_by_gits_checksum(plain, tmp_path):
    plain.fail("table.json", Fault("corrupt", times=2))
    with Hub(tmp_path / "root", wait_s=0.01) as opened, pytest.raises(HubError, match="checksum"):
        opened.fetch_tables(opened.open("o/n"), ["table.json"], tmp_path / "tables")
    with Hub(tmp_path / "root", wait_s=0.01) as opened:
        [table] = opened.fetch_tables(opened.open("o/n"), ["table.json"], tmp_path / "tables")
    assert table == tmp_path / "tables/o__n/table.json" and table.read_bytes() == SMALL


def test_the_hubs_wish_to_wait_is_granted(plain, tmp_path):
    plain.fail("api/datasets/o/n", Fault("status", code=429, retry_after_s=1))
    started = time.monotonic()
    files_of(tmp_path / "root", archives=())
    assert time.monotonic() - started >= 1.0


def test_a_hub_that_stays_away_ends_with_one_sentence(plain, tmp_path):
    plain.fail("videos/", Fault("status", code=502, times=100))
    with pytest.raises(HubError, match=r"o/n: videos/.*the hub answered 502, 6 times in a row.*run again"):
        files_of(tmp_path / "root", archives=())


def test_no_hub_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"o/n: ConnectError .* 6 times in a row"):
        files_of(tmp_path / "root")


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, r"is gated; accept its terms at http://.*/datasets/g/g, then set HF_TOKEN to a token of that"),
        ("hf_wrong", r"g/g: the token in use is not valid for it; set HF_TOKEN to one made at"),
        (STRANGER, r"g/g is gated and the token in use has no access; accept its terms at http://.*/g/g$"),
    ],
)
def test_a_gated_set_says_what_to_do(tmp_path, serve, monkeypatch, token, words):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.mp4").write_bytes(VIDEO)
    server = serve([Repository("g/g", tmp_path / "served", gated=True)])
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with Hub(tmp_path / "root", wait_s=0.01) as opened, pytest.raises(HubError, match=words) as said:
        opened.fetch_media(opened.catalogue(opened.open("g/g"), (), ("*.mp4",)), ["a.mp4"])
    assert "\n" not in str(said.value)
    assert {request.path.split("/")[0] for request in server.requests} == {"api"}  # before any file
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub(tmp_path / "root", wait_s=0.01) as opened:
        assert opened.fetch_media(opened.catalogue(opened.open("g/g"), (), ("*.mp4",)), ["a.mp4"])


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda h: h.open("no/such"), "has no dataset no/such, or it is private: set HF_TOKEN"),
        (lambda h: h.open("o/n", revision="v9"), "o/n has no revision 'v9'; write a commit or a branch"),
        (lambda h: h.fetch_tables(h.open("o/n"), ["*.csv"], Path("x")), r"o/n has no \*\.csv at"),
    ],
)
def test_what_is_not_there_is_said(plain, tmp_path, ask, words):
    with Hub(tmp_path / "root", wait_s=0.01) as opened, pytest.raises(HubError, match=words):
        ask(opened)


def test_a_licence_that_is_not_accepted_stops_before_any_content(tmp_path, serve):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.mp4").write_bytes(VIDEO)
    server = serve([Repository("o/n", tmp_path / "served", licence="cc-by-nc-nd-4.0")])
    with pytest.raises(
        HubError, match=r"o/n is under licence 'cc-by-nc-nd-4.0'.* add it to data.hub.licences"
    ):
        files_of(tmp_path / "root", files=("*.mp4",))
    assert {request.path.split("/")[0] for request in server.requests} == {"api"}


def test_a_disk_without_room_is_found_before_any_content(plain, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda path: usage._replace(free=5 * 2**30 + 60_000))
    with pytest.raises(HubError, match=r"o/n needs 0\.00 GiB under .*; make room, set PARAVT_MEDIA_ROOT"):
        files_of(tmp_path / "root", keep_free_gib=5.0)
    assert not any("videos/" in request.path for request in plain.requests)


def test_a_disk_that_fills_up_keeps_what_is_there(plain, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(HubError, match="the disk is full under .*run again"):
        broken.setattr(transfer._Counted, "write", full)
        files_of(tmp_path / "root", archives=())
    [file], _ = files_of(tmp_path / "root", archives=())
    assert MediaStore(tmp_path / "root").lacks(file) is None


def test_a_few_members_of_a_large_zip_are_read_by_ranges(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(catalogue, "SMALL_ARCHIVE_BYTES", 0)
    monkeypatch.setattr(catalogue, "LISTING_BLOCK", 1000)
    monkeypatch.setattr(catalogue, "MEMBER_BLOCK", 4000)
    members = {f"in/{n}.mp4": os.urandom(50_000) for n in range(20)}
    write_zip(tmp_path / "served" / "big.zip", members)
    server = serve([Repository("o/n", tmp_path / "served")])
    files, _ = files_of(tmp_path / "root", wanted=["in/7.mp4"])
    assert resolve_media(tmp_path / "root", "o/n", files[0].path).read_bytes() == members["in/7.mp4"]
    asked = [
        request.range
        for request in server.requests
        if request.server == "content" and request.method == "GET"
    ]
    sizes = [int(r.split("-")[1]) - int(r.removeprefix("bytes=").split("-")[0]) for r in asked]
    assert sum(sizes) < 150_000  # of a million
    files, held = files_of(tmp_path / "root")
    assert len(files) == 20 and not held.problems
    assert not any(
        "big.zip" in path.name for path in (tmp_path / "root").rglob("*")
    )  # unpacked, then removed


@pytest.mark.parametrize(
    "name", ["../evil.mp4", "/etc/evil.mp4", "a\\..\\evil.mp4", "C:evil.mp4", "a/\x00b.mp4"]
)
def test_archives_with_names_that_leave_are_not_unpacked(tmp_path, serve, name):
    write_zip(tmp_path / "served" / "bad.zip", {"in/fine.mp4": b"1", "placeholder": b"2"})
    data = (tmp_path / "served" / "bad.zip").read_bytes()
    raw = name.encode().ljust(len("placeholder"), b"x")[: len("placeholder")]
    (tmp_path / "served" / "bad.zip").write_bytes(data.replace(b"placeholder", raw))
    serve([Repository("o/n", tmp_path / "served")])
    with pytest.raises(ArchiveError, match=r"o/n: bad.zip holds a name that is not safe: .*not unpacked"):
        files_of(tmp_path / "root")
    assert not (tmp_path / "root" / "o__n").exists() and not list(tmp_path.rglob("evil*"))


def test_links_bombs_and_contradictions_are_not_unpacked(tmp_path, serve):
    served = tmp_path / "served"
    served.mkdir()
    with zipfile.ZipFile(served / "a.zip", "w") as archive:
        link = zipfile.ZipInfo("in/link.mp4")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo("in/link.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (served / "b.tar").write_bytes(buffer.getvalue())
    with zipfile.ZipFile(served / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in/bomb.mp4", b"\0" * 70 * 2**20)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(served / "d.zip", "w") as archive:
        archive.writestr("in/twice.mp4", b"1")
        archive.writestr("in/twice.mp4", b"2")
    serve([Repository("o/n", served)])
    for name, words in {
        "a.zip": "a link or device",
        "b.tar": "a link or device",
        "c.zip": "would unpack to 1 files of 73,400,320 bytes",
        "d.zip": "holds in/twice.mp4 twice",
    }.items():
        with pytest.raises(ArchiveError, match=words):
            files_of(tmp_path / "root", archives=(name,))


def test_what_is_broken_inside_an_archive_is_named_and_the_rest_arrives(tmp_path, serve, caplog):
    members = {f"in/{n}.mp4": os.urandom(3000) for n in range(3)}
    write_zip(tmp_path / "served" / "one.zip", members)
    data = bytearray((tmp_path / "served" / "one.zip").read_bytes())
    at = data.index(members["in/1.mp4"][100:120])
    data[at] ^= 0xFF
    (tmp_path / "served" / "one.zip").write_bytes(data)
    (tmp_path / "served" / "cut.zip").write_bytes(data[: len(data) // 2])
    serve([Repository("o/n", tmp_path / "served")])
    with caplog.at_level(logging.WARNING):
        files, held = files_of(tmp_path / "root")
    assert [file.path for file in files] == ["in/0.mp4", "in/2.mp4"]
    assert held.problems.keys() == {"in/1.mp4", "cut.zip"}
    assert "o/n: one.zip: in/1.mp4 is corrupt in the archive" in held.problems["in/1.mp4"]
    assert "cut.zip cannot be read as an archive" in held.problems["cut.zip"]


def test_another_commit_of_an_archive_replaces_what_it_changed(tmp_path, serve):
    served = tmp_path / "served"
    write_zip(served / "one.zip", {"in/same.mp4": b"s" * 99, "in/other.mp4": b"1" * 99})
    serve([Repository("o/n", served)])
    [before, same], _ = files_of(tmp_path / "root")
    write_zip(served / "one.zip", {"in/same.mp4": b"s" * 99, "in/other.mp4": b"2" * 99})
    serve([Repository("o/n", served)])
    [after, still], _ = files_of(tmp_path / "root")
    assert (still.sha256, after.revision) == (same.sha256, still.revision) != (same.sha256, before.revision)
    assert resolve_media(tmp_path / "root", "o/n", "in/other.mp4").read_bytes() == b"2" * 99
    store = MediaStore(tmp_path / "root")
    assert (
        store.lacks(before) == "another content than the manifest's" and store.blob(before.sha256).is_file()
    )


def _fill(endpoint: str, root: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with it ignored
    from huggingface_hub import constants

    constants.DOWNLOAD_CHUNK_SIZE = 1000
    os.environ["HF_ENDPOINT"] = endpoint
    files_of(root)


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_download_ends_at_once_and_goes_on_later(plain, tmp_path, how, code):
    plain.fail("videos/", Fault("trickle", seconds=0.1))
    key = plain.repositories[0].entries["videos/a b%20é.mp4"].etag
    part = tmp_path / "root" / "parts" / key
    worker = get_context("spawn").Process(target=_fill, args=(plain.endpoint, tmp_path / "root"))
    worker.start()
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 2000):
        assert worker.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    started = time.monotonic()
    os.kill(worker.pid, how)
    worker.join(30)
    assert worker.exitcode == code and time.monotonic() - started < 20
    kept = part.stat().st_size
    assert 2000 < kept < len(VIDEO) and part.read_bytes() == VIDEO[:kept]
    plain.requests.clear()
    [file], _ = files_of(tmp_path / "root", archives=())
    assert MediaStore(tmp_path / "root").lacks(file) is None and not part.exists()
    assert [request.range for request in plain.requests if request.server == "content"] == [f"bytes={kept}-"]


def test_workers_fill_one_root_at_once(plain, tmp_path):
    plain.fail("videos/", Fault("slow", seconds=0.5))
    spawn = get_context("spawn")
    workers = [spawn.Process(target=_fill, args=(plain.endpoint, tmp_path / "root")) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    content = [
        r.path for r in plain.requests if r.server == "content" and r.range is None and r.method == "GET"
    ]
    assert len(content) == len(set(content))  # each file came once, whole
    files, _ = files_of(tmp_path / "root")
    assert len(files) == 4 and all(MediaStore(tmp_path / "root").lacks(file) is None for file in files)


def test_another_machine_fills_its_root_from_the_manifest(published, serve, tmp_path, monkeypatch):
    serve(published)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    media = fetch_benchmarks(["longvideobench", "mmvu", "charades"], tmp_path / "tables", tmp_path / "here")
    write_manifest(tmp_path / "manifest.jsonl", media)
    with Hub(tmp_path / "there", wait_s=0.01) as opened:
        assert opened.refetch(read_manifest(tmp_path / "manifest.jsonl")) == []
    there = MediaStore(tmp_path / "there")
    assert all(there.lacks(file) is None for file in media)
    blob = there.blob(media[0].sha256)
    blob.chmod(0o644)
    blob.write_bytes(b"cut")
    assert there.lacks(media[0]) == "another size than the manifest's"


def test_a_models_weights_are_named_and_found(published, serve, tmp_path, monkeypatch):
    serve(published)
    folder = tmp_path / "model"
    folder.mkdir()
    with Hub(tmp_path / "root", wait_s=0.01) as opened:
        opened.fetch_model(opened.open("Qwen/Qwen3-VL-8B-Instruct", "model"), folder)
    assert not (folder / "model.safetensors").exists() and (folder / "tokenizer.json").is_file()
    monkeypatch.setenv("PARAVT_MEDIA_ROOT", str(tmp_path / "root"))
    real = real_folder(folder)
    assert (real / "model.safetensors").stat().st_size > 10_000 and (real / "config.json").is_file()
    assert real_folder(folder) == real
    monkeypatch.setenv("PARAVT_MEDIA_ROOT", str(tmp_path / "empty"))
    with pytest.raises(WeightsError, match="model.safetensors of Qwen/Qwen3-VL-8B-Instruct .* missing; run"):
        real_folder(folder)


def test_media_that_a_table_names_and_nothing_holds_are_told(tmp_path, serve):
    (tmp_path / "served").mkdir()
    rows = [{"video": "there.mp4"}, {"video": "gone.mp4"}]
    (tmp_path / "served" / "t.json").write_text(json.dumps(rows))
    write_zip(tmp_path / "served" / "v.zip", {"there.mp4": b"1", "other.mp4": b"2"})
    serve([Repository("o/n", tmp_path / "served")])
    source = Source("made", "o/n", tables=("t.json",), media_columns=("video",), archives=("*.zip",))
    with Hub(tmp_path / "root", wait_s=0.01) as opened:
        found = fetch_benchmark(opened, source, tmp_path / "tables")
    assert [file.path for file in found.media] == ["there.mp4"]
    assert (found.rows, found.missing) == (2, ["gone.mp4"])
    with pytest.raises(ValueError, match="no published benchmark is called 'mme'; use one of videomme"):
        hub.fetch_benchmarks(["mme"], tmp_path, tmp_path)
