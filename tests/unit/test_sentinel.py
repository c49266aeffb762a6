"""Names of published media: which file they mean, and that none leaves the media root."""

from __future__ import annotations

import json
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from paravt.data.media import (
    MediaFile,
    media_path,
    on_this_machine,
    read_manifest,
    resolve_media,
    safe_path,
    sha256_of,
    write_manifest,
)
from paravt.data.sentinel import (
    Resolver,
    RowError,
    Sentinel,
    media_of,
    read_messages,
    read_sentinel,
    row_media,
    text_of,
    videos_of,
)
from paravt.video import spellings

# ten thousand cases a test: twenty texts at a time, of the characters that paths and URIs trip over
ODD = "a0._- %25\\/:~#?&+é視\u0301\x00\n🎬"
NAMES = st.lists(st.text(ODD, min_size=1, max_size=12), min_size=20, max_size=20)
TEXTS = st.lists(st.text(ODD + "selfqa/museg", max_size=24), min_size=20, max_size=20)
ROOTS = ("longvt_source/selftrace", "museg/charades", "museg/et_instruct_164k", "selfqa")


@pytest.mark.parametrize(
    ("url", "bucket", "paths"),
    [
        ("longvt_source/tvg/a/b.mp4", "longvt_source/tvg", ("longvt_source/tvg/a/b.mp4",)),
        ("museg/charades/AB12C.mp4", "museg/charades", ("museg/charades/AB12C.mp4",)),
        ("museg/et_instruct_164k/x.mp4", "museg/et_instruct_164k", ("museg/et_instruct_164k/x.mp4",)),
        ("selfqa/v.mp4", "selfqa", ("selfqa/v.mp4",)),
        ("file://selfqa/v.mp4", "selfqa", ("selfqa/v.mp4",)),
        ("file:///selfqa/v.mp4", "selfqa", ("selfqa/v.mp4",)),
        ("file://selfqa/a%20b.mp4", "selfqa", ("selfqa/a b.mp4", "selfqa/a%20b.mp4")),
        ("file://selfqa/a%2520b.mp4", "selfqa", ("selfqa/a%20b.mp4", "selfqa/a%2520b.mp4")),  # decoded once
        ("selfqa/a%20b.mp4", "selfqa", ("selfqa/a%20b.mp4",)),  # a plain path is not decoded
    ],
)
def test_a_sentinel_has_a_bucket_and_a_path(url, bucket, paths):
    assert read_sentinel(url) == Sentinel(bucket, paths)


@pytest.mark.parametrize(
    "url",
    ["", "x.mp4", "/selfqa/v.mp4", "selfqa", "selfqa/", "longvt_source/v.mp4", "museg/other/v.mp4"]
    + ["selfqa/../../etc/passwd", "file://selfqa/%2e%2e/%2e%2e/etc/passwd", "https://selfqa/v.mp4"]
    + ["selfqa/a\\..\\b.mp4", "selfqa//v.mp4", "selfqa/\x00.mp4", "file://selfqa/%00.mp4"],
)
def test_what_is_under_no_root_or_leaves_it_is_none(url):
    found = read_sentinel(url)
    # a spelling that decodes to a way out is dropped; the text as it stands may be an odd, harmless name
    assert found is None or all(".." not in path.split("/") and "\x00" not in path for path in found.paths)
    assert found is None or url.startswith("file://")


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(ROOTS), NAMES, st.booleans())
def test_every_spelling_of_a_path_means_the_same_file(root, names, slashed):
    for name in names:
        path = f"{root}/{name}"
        try:
            safe_path(path)
        except ValueError:
            assert read_sentinel(path) is None
            continue
        plain = read_sentinel(path)
        encoded = read_sentinel(f"file://{'/' if slashed else ''}{quote(path)}")
        assert plain and encoded
        assert plain.bucket == encoded.bucket == root
        assert plain.paths == (path,)
        assert encoded.paths[0] == path
        assert Resolver([path]).find(f"file://{quote(path)}") == Resolver([path]).find(path) == path


@settings(max_examples=500, deadline=None)
@given(TEXTS, st.sampled_from(("", "file://", "file:///", "FILE://localhost/")))
def test_no_text_raises_or_leaves_the_root(texts, scheme):
    for text in texts:
        for spelling in spellings(scheme + text):
            try:
                found = resolve_media("/root", "o/n", spelling)
            except ValueError:
                continue
            assert found.parts[:3] == ("/", "root", "o__n") and ".." not in found.parts
        sentinel = read_sentinel(scheme + text)
        assert sentinel is None or all(safe_path(path) for path in sentinel.paths)


def test_a_name_that_was_never_encoded_is_found_second():
    resolver = Resolver(["selfqa/50%20off.mp4", "selfqa/a b.mp4"])
    assert resolver.find("file://selfqa/50%20off.mp4") == "selfqa/50%20off.mp4"
    assert resolver.find("file://selfqa/a%20b.mp4") == "selfqa/a b.mp4"


def test_what_is_missing_is_counted_once_by_bucket():
    resolver = Resolver(["selfqa/a.mp4", "museg/charades/b.mp4"], frozenset({"selfqa"}))
    assert resolver.find("selfqa/a.mp4") == "selfqa/a.mp4"
    for url, reason in [
        ("selfqa/gone.mp4", "media missing in selfqa"),
        ("selfqa/gone.mp4", "media missing in selfqa"),
        ("museg/charades/b.mp4", "bucket museg/charades is not chosen"),
        ("elsewhere.mp4", "its media are named by no known root"),
    ]:
        assert resolver.look(url) is None
        with pytest.raises(RowError, match=reason):
            resolver.find(url)
    assert resolver.report() == {
        "elsewhere": {"named": 1, "missing": 1, "examples": ["elsewhere.mp4"]},
        "museg/charades": {"named": 1, "missing": 1, "examples": ["museg/charades/b.mp4"]},
        "selfqa": {"named": 2, "missing": 1, "examples": ["selfqa/gone.mp4"]},
    }


MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "video_url", "text": None, "video_url": {"url": "selfqa/a.mp4"}, "image_url": None},
            {"type": "text", "text": "Which?", "video_url": None, "image_url": None},
        ],
    },
    {"role": "assistant", "content": "<think>x</think><answer>A</answer>"},
]


@pytest.mark.parametrize(
    "value",
    [
        MESSAGES,
        json.dumps(MESSAGES),
        {"messages": MESSAGES},
        json.dumps({"messages": MESSAGES}),
        {"messages": json.dumps(MESSAGES)},
        json.dumps({"messages": json.dumps(MESSAGES)}),
    ],
)
def test_messages_come_as_a_list_as_text_and_wrapped(value):
    user, assistant = read_messages(value)
    assert list(media_of(user)) == [("video", "selfqa/a.mp4")]
    assert text_of(user) == "Which?"
    assert user["content"][1] == {"type": "text", "text": "Which?"}  # null keys are gone
    assert text_of(assistant) == "<think>x</think><answer>A</answer>"
    assert row_media({"messages": value}) == ["selfqa/a.mp4"]


@pytest.mark.parametrize(
    "value", [None, "", "{", "[]", [], ["x"], {"a": 1}, [{"role": "user", "content": 3}], 7]
)
def test_messages_that_are_none_are_a_reason(value):
    with pytest.raises(RowError, match=r"^(messages are not|a message's content)"):
        read_messages(value)


@pytest.mark.parametrize(
    ("videos", "found"),
    [
        ([{"video": "selfqa/a.mp4", "fps": 1}], ["selfqa/a.mp4"]),
        (["selfqa/a.mp4"], ["selfqa/a.mp4"]),
        ('[{"video": "selfqa/a.mp4"}]', ["selfqa/a.mp4"]),
        ("selfqa/a.mp4", ["selfqa/a.mp4"]),
        ([], []),
        (None, []),
    ],
)
def test_videos_of_rl_rows(videos, found):
    assert videos_of({"videos": videos}) == found


def test_tables_name_media_alike_on_every_machine(tmp_path):
    written = media_path("ParaVT/ParaVT-Source", "selfqa/a b.mp4")
    assert written == "data/media/ParaVT__ParaVT-Source/selfqa/a b.mp4"
    assert on_this_machine(written, {}) == written
    moved = on_this_machine(written, {"PARAVT_MEDIA_ROOT": "/mnt/m"})
    assert moved == "/mnt/m/ParaVT__ParaVT-Source/selfqa/a b.mp4"
    assert (
        on_this_machine("data/needles/videos/x.mp4", {"PARAVT_MEDIA_ROOT": "/mnt/m"})
        == "data/needles/videos/x.mp4"
    )
    files = [
        MediaFile("o/n", "c" * 40, f"{n}.mp4", n, f"{n:064x}", None if n else "a.zip") for n in (2, 0, 1)
    ]
    write_manifest(tmp_path / "m.jsonl", [*files, files[0]])
    assert read_manifest(tmp_path / "m.jsonl") == sorted(files, key=lambda file: file.path)
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_of(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
