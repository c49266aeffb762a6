"""Imports go one way: the contracts of pyproject.toml hold, and no module is its own ancestor."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
import subprocess
import sys

import grimp
import pytest

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


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions and those for types alone count too."""
    graph = grimp.build_graph("paravt", "stages", "flows", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
