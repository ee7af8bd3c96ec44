"""Import the lab roles' own modules the way Ansible does: their helpers live below ansible.module_utils."""

from __future__ import annotations

import importlib
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


def _gpu_slices() -> None:
    """Make ansible.module_utils.gpu_slices the project's own package, as Ansible does for modules."""
    for name in ("gpu_slices", "gpu_slices.kube_api", "gpu_slices.resource_slices"):
        sys.modules.setdefault(f"ansible.module_utils.{name}", importlib.import_module(name))


def lab_wait() -> ModuleType:
    _gpu_slices()
    return load("roles/lab_operators/library/lab_wait.py", "lab_wait")


def lab_status() -> ModuleType:
    _gpu_slices()
    lab_host()
    return load("roles/lab_nodes/library/lab_status.py", "lab_status")
