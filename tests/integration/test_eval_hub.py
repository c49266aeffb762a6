"""From a hub to figures by two commands: all splits fetched with their media, then asked of an endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paravt import cli
from paravt.benchmarks import PUBLISHED
from tests.chat_server import ChatServer
from tests.hub_server import TOKEN, HubServer
from tests.miniature import build
from tests.tiny import tiny_folder


@pytest.mark.slow
def test_published_splits_from_the_hub_to_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(json.dumps({"episode": {"mode": "direct"}}))
    monkeypatch.setenv("PARAVT_MEDIA_ROOT", str(tmp_path / "media"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer(build(tmp_path / "hub")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        words = ["eval", "fetch", "--benchmarks", ",".join(PUBLISHED), "--tables", "tables"]
        assert cli.main(words) == 2
        assert "is under licence 'unknown', which is not among those accepted" in capsys.readouterr().err
        assert not any(path.is_file() for path in Path("media").rglob("*"))
        assert cli.main([*words, "--licences", "apache-2.0,mit,cc-by-nc-sa-4.0,unknown"]) == 0
        assert "media files of videomme, longvideobench" in capsys.readouterr().out

    def answer(body):
        text = str(body["messages"][-1]["content"])
        return f"<answer>{'1.0 to 2.0' if 'start to end' in text else 'A'}</answer>"

    words = ["--benchmarks", ",".join(PUBLISHED), "--tables", "tables", "--budget", "4", "--out", "out"]
    with ChatServer(answer) as server:
        words += ["--endpoint", server.url, "--tokenizer", str(tiny_folder()), "--max-error-share", "0.5"]
        assert cli.main(["eval", *words]) == 0
    summary = json.loads(Path("out/summary.json").read_text())
    assert set(summary) == set(PUBLISHED)
    for name, figures in summary.items():
        counts = figures["counts"]
        assert counts["answered"] and not counts["failed"], (name, figures["reasons"])
        shown = counts["asked"] - counts["skipped"]
        assert counts["answered"] + counts["unparsed"] == shown
    assert summary["videomme_wsub"]["by"]["subtitles"].keys() & {"all", "part"}
    assert cli.main(["eval", "report", "out"]) == 0
    assert "| **out** | this run |" in capsys.readouterr().out
