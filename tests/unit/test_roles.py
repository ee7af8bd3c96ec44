"""What every role promises: defaults as its argument spec says, and names that carry its prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from gpu_slices.inputs import PREFIXES, STAGES_WITH_IMAGE

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.parent.parent for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))
PRODUCT = [role for role in ROLES if not role.name.startswith("lab_")]


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.exists() else {}


def options(role):
    return load(role / "meta/argument_specs.yml")["argument_specs"]["main"].get("options") or {}


def test_every_role_has_an_argument_spec():
    with_tasks = {path.parent.parent for path in (ROOT / "roles").glob("*/tasks/main.yml")}
    assert with_tasks <= set(ROLES)
    assert len(ROLES) > 5


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_defaults_and_argument_specs_agree_in_values(role):
    declared = {name: spec["default"] for name, spec in options(role).items() if not spec.get("required")}
    assert load(role / "defaults/main.yml") == declared


def _untyped(prefix, specs):
    for name, spec in specs.items():
        if "type" not in spec or "description" not in spec:
            yield f"{prefix}{name}"
        if spec.get("type") == "list" and "elements" not in spec:
            yield f"{prefix}{name} (elements)"
        yield from _untyped(f"{prefix}{name}.", spec.get("options") or {})


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_option_is_typed_and_described(role):
    assert list(_untyped("", options(role))) == []


@pytest.mark.parametrize("role", PRODUCT, ids=lambda role: role.name)
def test_every_variable_carries_the_prefix_of_its_role(role):
    prefixes = ("gpu_slices_", "inputs_") if role.name == "inputs" else (f"{role.name}_",)
    assert [name for name in options(role) if not name.startswith(prefixes)] == []
    if options(role) and role.name != "inputs":
        assert f"{role.name}_" in PREFIXES


@pytest.mark.parametrize("role", PRODUCT, ids=lambda role: role.name)
def test_gate_1_runs_before_every_role(role):
    if role.name == "inputs":
        pytest.skip("it is gate 1")
    names = [
        item["role"] if isinstance(item, dict) else item
        for item in load(role / "meta/main.yml")["dependencies"]
    ]
    reached = set(names)
    for name in names:
        reached |= {
            item["role"] if isinstance(item, dict) else item
            for item in load(ROOT / "roles" / name / "meta/main.yml").get("dependencies") or []
        }
    assert "inputs" in reached


def test_every_play_names_the_stages_whose_inputs_it_needs():
    choices = set(options(ROOT / "roles/inputs")["inputs_stages"]["choices"])
    named = {
        path.stem: {
            stage for play in load(path) for stage in play.get("vars", {}).get("inputs_stages") or [None]
        }
        for path in (ROOT / "playbooks").glob("*.yml")
        if path.stem not in {"site", "preflight", "c15"}
    }
    assert len(named) > 4
    assert set().union(*named.values()) <= choices
    # Of these the report needs nothing: no stage that asks for an image.
    assert named["report"] == {"report"}
    assert not named["report"] & set(STAGES_WITH_IMAGE)
