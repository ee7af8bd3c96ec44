"""Ansible loads every filter file in each task that uses one: none may drag in the kubernetes package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILTERS = sorted((Path(__file__).resolve().parents[2] / "plugins/filter").glob("*.py"))


@pytest.mark.parametrize("path", FILTERS, ids=lambda path: path.name)
def test_a_filter_file_is_cheap_to_load(path):
    code = (
        "import runpy, sys\n"
        f"names = runpy.run_path({str(path)!r})['FilterModule']().filters()\n"
        "assert names and all(map(callable, names.values()))\n"
        "heavy = [name for name in sys.modules if name.partition('.')[0] in ('kubernetes', 'urllib3')]\n"
        "print(heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
