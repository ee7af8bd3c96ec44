"""Render the manifests of a role as Ansible does, without a cluster."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Callable

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar

try:
    from ansible.template import trust_as_template
except ImportError:  # older than 2.19

    def trust_as_template(value: str) -> str:
        return value


init_plugin_loader()

ROOT = Path(__file__).resolve().parents[2]
Render = Callable[..., list[dict[str, Any]]]

CLAIM = {
    "profile": "1g.6gb",
    "template": "gpu-slices-mig-1g-6gb",
    "request": "gpu-slice",
    "device_class": "mig.nvidia.com",
    "driver": "gpu.nvidia.com",
    "skip_reason": "",
}


def _trusted(value: Any) -> Any:
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, dict):
        return {key: _trusted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_trusted(item) for item in value]
    return value


def _templar(role: str, **changed: Any) -> Templar:
    folder = ROOT / "roles" / role
    variables: dict[str, Any] = {}
    for source in (ROOT / "roles/inputs/defaults", folder / "defaults", folder / "vars"):
        if (source / "main.yml").exists():
            variables.update(yaml.safe_load((source / "main.yml").read_text()) or {})
    variables = _trusted(variables) | {
        "gpu_slices_image": "registry.example/train:1",
        "slice_claim_result": copy.deepcopy(CLAIM),
        "role_path": str(folder),
        "ansible_search_path": [str(folder)],
        **changed,
    }
    return Templar(loader=DataLoader(), variables=variables)


def render(role: str, **changed: Any) -> list[dict[str, Any]]:
    """The manifests of a role with its defaults and these variables."""
    rendered = _templar(role, **changed).template(trust_as_template(f"{{{{ __{role}_manifests }}}}"))
    # Ansible hands out tagged subclasses of str and int; JSON makes them plain.
    return list(json.loads(json.dumps(rendered)))


def render_template(role: str, name: str, **changed: Any) -> dict[str, Any]:
    """One template of a role."""
    text = f"{{{{ lookup('ansible.builtin.template', '{name}') | ansible.builtin.from_yaml }}}}"
    rendered = _templar(role, **changed).template(trust_as_template(text))
    return dict(json.loads(json.dumps(rendered)))


@pytest.fixture(scope="session", name="render")
def render_fixture() -> Render:
    return render
