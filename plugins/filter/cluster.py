"""Filters from cluster facts to checks and choices. Each only calls the function of the same purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Mapping

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import claim, driver_state, inputs, preflight


def hardware(nodes: Mapping[str, str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """What the hosts' GPUs hold: Kubernetes node -> ``mig_gpus``, for hosts that were read in this run."""
    return {node: hostvars[host]["mig_gpus"] for host, node in nodes.items() if "mig_gpus" in hostvars[host]}


def unread(nodes: Mapping[str, str], hostvars: Mapping[str, Any]) -> list[str]:
    """Hosts that Ansible may log in to and whose GPUs this run has not read all the same."""
    return [
        host for host in nodes if "mig_gpus" not in hostvars[host] and inputs.may_be_reached(hostvars[host])
    ]


class FilterModule:
    """Judging facts, choosing a slice, planning the claim."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "preflight_rights": preflight.needed_rights,
            "preflight_objects": preflight.named_objects,
            "preflight_checks": preflight.preflight_checks,
            "driver_hardware": hardware,
            "hosts_unread": unread,
            "driver_verdict": driver_state.verdict,
            "helm_release_differs": driver_state.release_differs,
            "helm_release_damaged": driver_state.release_damaged,
            "slice_choice": claim.choice,
            "slice_checks": claim.claim_checks,
            "slice_name": claim.template_name,
            "slice_template_plan": claim.template_plan,
            "slice_result": claim.result,
        }
