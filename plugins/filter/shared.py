"""Filters for sharing a GPU. Each only calls the function of the same purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Mapping

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import driver_gates, driver_state, shared


def driver_namespace(facts: Mapping[str, Any]) -> str:
    """The namespace of the driver's plugin, which is that of the daemons it starts; "" without a plugin."""
    plugin = driver_state.find_plugin(dict(facts))
    return str(plugin["namespace"]) if plugin else ""


class FilterModule:
    """Choosing a GPU, planning the claim, what the driver is to be given."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "driver_namespace": driver_namespace,
            "gpu_sharing": shared.sharing,
            "sharing_values": driver_gates.helm_gates,
            "shared_choice": shared.choose,
            "shared_choice_check": shared.choice_check,
            "shared_claim_plan": shared.claim_plan,
            "shared_claim_check": shared.claim_check,
            "shared_daemons": shared.daemons_of,
            "shared_daemon_check": shared.daemon_check,
        }
