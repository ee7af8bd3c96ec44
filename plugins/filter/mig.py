# SPDX-License-Identifier: MIT
"""Filters around MIG layouts: join their sources, find claimed devices, report the GPUs of a node."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import yaml
from ansible.errors import AnsibleFilterError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.mig_geometry import LayoutError
from gpu_slices.mig_layout import merge_configs
from gpu_slices.resource_slices import claimed_devices


def mig_merge_configs(configs: Any, file_text: str = "", file_name: str = "") -> dict[str, Any]:
    """Layouts of the inventory and of a mig-parted file (its text) as one map; raises on any fault."""
    content: Any = None
    if file_text:
        try:
            content = yaml.safe_load(file_text)
        except yaml.YAMLError as error:
            raise AnsibleFilterError(f"{file_name or 'the layout file'} is not YAML: {error}") from None
    try:
        return merge_configs(configs, content, file_name)
    except LayoutError as error:
        raise AnsibleFilterError("; ".join(error.faults)) from None


def mig_claimed(facts: Mapping[str, Any], node: str) -> list[dict[str, str]]:
    """The devices of a Kubernetes node that pods hold, from the cluster facts slices and claims."""
    return [
        {"uuid": item["uuid"], "holder": item["holder"]}
        for item in claimed_devices(facts["slices"]["devices"], facts["claims"])
        if item["node"] == node
    ]


def mig_checks(
    gpus: Sequence[Mapping[str, Any]],
    host: str,
    layout: str,
    plan: Sequence[Mapping[str, Any]] = (),
    restored: bool = False,
) -> list[dict[str, Any]]:
    """One report row per GPU of ``host``.

    ``layout`` "" = not managed. A GPU without a row in ``plan`` is one that no entry of the layout matches
    or, with ``restored``, one whose layout was never recorded.
    """
    planned = {row["index"] for row in plan}
    rows: list[dict[str, Any]] = []
    for gpu in gpus:
        cut = Counter(device["profile"] for device in gpu["mig_devices"])
        instances = (
            ", ".join(f"{count} x {profile}" for profile, count in sorted(cut.items())) or "no instance"
        )
        found = f"MIG {gpu['mig_mode_current']}"
        if gpu["mig_mode_current"] == "Enabled":
            found += f", {instances}"
        rows.append(
            {
                "id": f"mig-{host}-gpu{gpu['index']}",
                "status": "pass",
                "asked": f"{host} GPU {gpu['index']} ({gpu['name']}): "
                + _asked(layout, gpu["index"] in planned, restored),
                "found": found,
                "evidence": {
                    "uuid": gpu["uuid"],
                    "devices": [
                        f"{device['uuid']} {device['profile']}"
                        f" {device['placement_start']}:{device['placement_size']}"
                        for device in gpu["mig_devices"]
                    ],
                },
            }
        )
    return rows


def _asked(layout: str, planned: bool, restored: bool) -> str:
    if restored:
        return "the layout from before the first run" if planned else "left alone (no layout was recorded)"
    if not layout:
        return "read only (mig_config is empty)"
    return f"layout {layout}" if planned else f"left alone (no entry of {layout} matches)"


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "mig_merge_configs": mig_merge_configs,
            "mig_claimed": mig_claimed,
            "mig_checks": mig_checks,
        }
