"""A wrong inventory through the real site.yml: one message, nothing asked or changed, no traceback."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

GOOD: dict[str, Any] = {
    "all": {
        "vars": {
            # Nothing listens there: a run that gets past gate 1 fails with another message.
            "gpu_slices_kubeconfig": "/nonexistent/kubeconfig",
            "gpu_slices_image": "registry.example/train:1",
            "mig_configs": {
                "four": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.6gb": 4}}],
                "nine": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.6gb": 9}}],
                "alien": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 1}}],
                "unplaceable": [
                    {"devices": "all", "mig-enabled": True, "mig-devices": {"4g.24gb": 1, "1g.6gb": 1}}
                ],
            },
        },
        "children": {
            "gpu_nodes": {
                "hosts": {
                    "node-1": {
                        "ansible_connection": "local",
                        "mig_config": "four",
                        "mig_gpu_models": ["NVIDIA A30"],
                        # A node that gate 1 lets through would be asked with this, and fail otherwise.
                        "mig_nvidia_smi": "/nonexistent/nvidia-smi",
                    }
                }
            }
        },
    }
}


def run(
    tmp_path: Path, inventory: dict[str, Any], *arguments: str, mode: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run site.yml on that inventory; ``mode`` is what the environment says."""
    path = tmp_path / "hosts.yml"
    path.write_text(yaml.safe_dump(inventory))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "DRA_SLICE_MODE": mode,
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            f"--inventory={path}",
            f"--extra-vars=gpu_slices_artifacts_dir={tmp_path / 'artifacts'}",
            *arguments,
            "site.yml",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def broken(**changes: Any) -> dict[str, Any]:
    """The good inventory with some variables of all hosts changed."""
    inventory = copy.deepcopy(GOOD)
    inventory["all"]["vars"].update(changes)
    return inventory


def broken_host(**changes: Any) -> dict[str, Any]:
    """The good inventory with some variables of the node changed."""
    inventory = copy.deepcopy(GOOD)
    inventory["all"]["children"]["gpu_nodes"]["hosts"]["node-1"].update(changes)
    return inventory


def without_nodes() -> dict[str, Any]:
    """The good inventory with an empty group of GPU nodes."""
    inventory = copy.deepcopy(GOOD)
    inventory["all"]["children"]["gpu_nodes"]["hosts"] = {}
    return inventory


@pytest.mark.parametrize(
    ("inventory", "expected"),
    [
        (broken(gpu_slices_profil="1g.6gb"), ["gpu_slices_profil ", "did you mean gpu_slices_profile"]),
        (broken(gpu_slices_memory="5 GB or so"), ["gpu_slices_memory", "5 GB or so"]),
        (broken(gpu_slices_required="perhaps"), ["gpu_slices_required", "perhaps"]),
        (broken_host(mig_config="fuor"), ["node-1", "fuor", "four"]),
        (broken_host(mig_config="nine"), ["node-1", "A30 holds at most 4 x 1g.6gb"]),
        (broken_host(mig_config="alien"), ["node-1", "1g.5gb"]),
        (broken_host(mig_config="unplaceable"), ["node-1", "unplaceable"]),
        (without_nodes(), ["gpu_nodes"]),
    ],
    ids=["misspelt", "quantity", "type", "layout-name", "too-many", "profile", "placement", "no-nodes"],
)
def test_one_message_and_nothing_asked(
    tmp_path: Path, inventory: dict[str, Any], expected: list[str]
) -> None:
    done = run(tmp_path, inventory)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    for text in expected:
        assert text in output, output
    assert "Traceback" not in output
    assert output.count("fatal: ") == 1, output
    assert "changed=0" in output
    assert "/nonexistent" not in output, "a gate after the first one was reached"


@pytest.mark.parametrize(
    ("inventory", "mode", "expected"),
    [
        (broken(), "vgpu", ["DRA_SLICE_MODE", "'vgpu': needed is mig or shared"]),
        (broken(gpu_slices_mode="vgpu"), "", ["gpu_slices_mode", "mig, shared, got: vgpu"]),
        (broken(gpu_slices_profile="1g.6gb"), "shared", ["gpu_slices_profile is 1g.6gb", "a MIG device"]),
        (broken(shared_interval="Fast"), "", ["shared_interval", "Short, Medium, Long, got: Fast"]),
        (
            broken(shared_mps='{"defaultActiveThreadPercentage": 5}'),
            "",
            ["shared_mps is text: needed is a mapping"],
        ),
        (
            broken(
                shared_strategy="MPS",
                shared_interval="Long",
                shared_claim_kind="ResourceClaimTemplate",
                shared_jobs=300,
                dra_driver_install=True,
                dra_driver_values={"featureGates": {"DynamicMIG": True}},
                gpu_slices_nodes_reachable=True,
            ),
            "shared",
            [
                "shared_interval is Long and shared_strategy is MPS",
                "shared_claim_kind is ResourceClaimTemplate",
                "shared_jobs is 300",
                "both DynamicMIG and MPSSupport",
            ],
        ),
    ],
    ids=["environment", "mode", "profile", "interval", "text", "many"],
)
def test_wrong_uses_of_sharing(
    tmp_path: Path, inventory: dict[str, Any], mode: str, expected: list[str]
) -> None:
    done = run(tmp_path, inventory, mode=mode)
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    for text in expected:
        assert text in output, output
    assert "Traceback" not in output
    assert output.count("fatal: ") == 1, output
    assert "/nonexistent" not in output, "a gate after the first one was reached"


def test_all_faults_come_in_one_message(tmp_path: Path) -> None:
    inventory = broken(gpu_slices_profil="1g.6gb", gpu_slices_memory="much")
    inventory["all"]["children"]["gpu_nodes"]["hosts"]["node-1"]["mig_config"] = "nine"
    output = run(tmp_path, inventory).stdout
    assert "3 faults" in output
    for text in ("gpu_slices_profile", "much", "A30 holds at most 4"):
        assert text in output, output


def test_the_good_inventory_gets_past_gate_one(tmp_path: Path) -> None:
    done = run(tmp_path, GOOD)
    assert done.returncode != 0
    assert "There is no kubeconfig at /nonexistent/kubeconfig" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_stages_that_are_not_chosen_need_nothing(tmp_path: Path) -> None:
    inventory = broken(gpu_slices_image="")
    assert "gpu_slices_image is empty" in run(tmp_path, inventory).stdout
    # Gate 1 runs in the plays of all stages; gate 2, which asks the cluster, is left out.
    done = run(tmp_path, inventory, "--tags=none-of-ours", "--skip-tags=preflight")
    assert done.returncode == 0, done.stdout + done.stderr
