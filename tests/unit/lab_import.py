"""Import the lab roles' own modules the way Ansible does: their helpers live below ansible.module_utils."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(path: str, name: str) -> ModuleType:
    """Import a file of the repository under a given module name, once."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def lab_plan() -> ModuleType:
    return load("roles/lab_nodes/module_utils/lab_plan.py", "ansible.module_utils.lab_plan")


def lab_host() -> ModuleType:
    lab_plan()
    return load("roles/lab_nodes/module_utils/lab_host.py", "ansible.module_utils.lab_host")


def lab_pki() -> ModuleType:
    return load("roles/lab_control_plane/library/lab_pki.py", "lab_pki")
