"""Imports go one way: the contracts of pyproject.toml hold."""

from __future__ import annotations

import subprocess
import sys

from stages.params import ROOT


def test_import_contracts():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
