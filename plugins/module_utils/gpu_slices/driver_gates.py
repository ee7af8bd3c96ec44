"""The DRA driver's feature gates for sharing a GPU: which one a strategy needs, and whether it is on.

Pure functions. From 25.8 on the driver refuses a sharing strategy whose gate is off, when it prepares the
device: long after the pod was scheduled. So the gates are read from the DaemonSet beforehand. Up to 25.3
there were none.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Mapping

Object = Dict[str, Any]

TIME_SLICING, MPS = "TimeSlicing", "MPS"
# Strategy -> the gate without which the driver refuses it.
GATES = {TIME_SLICING: "TimeSlicingSettings", MPS: "MPSSupport"}
# With this gate on, the driver sets a GPU back to its default compute mode when a claim lets go of it. MPS
# leaves it in EXCLUSIVE_PROCESS otherwise, in which the next claim's second process finds no room.
RESET = "TimeSlicingSettings"
# The first release with gates, in the numbering that NVIDIA used then (25.8); 0.4 came after 25.12.
_FIRST_WITH_GATES = (25, 8)


def gates_for(strategy: str) -> list[str]:
    """The gates that a strategy is to run with: the one it needs, and the one that clears up after it."""
    return list(dict.fromkeys([GATES[strategy], RESET]))


def parse_gates(text: str) -> dict[str, bool]:
    """``FEATURE_GATES`` as the driver reads it: ``A=true,B=false,``; what cannot be read is left out."""
    gates: dict[str, bool] = {}
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if equals and value.strip().lower() in ("true", "false", "1", "0", "t", "f"):
            gates[name.strip()] = value.strip().lower() in ("true", "1", "t")
    return gates


def is_on(gates: Mapping[str, bool], name: str) -> bool:
    """Whether an alpha gate is on: by itself, or with all of them."""
    return bool(gates.get(name, gates.get("AllAlpha", False)))


def driver_version(chart: str, images: Iterable[str]) -> str:
    """The driver's version from its chart label or the tag of an image; "" where neither tells."""
    for text in [chart, *(image.partition("@")[0].rpartition("/")[2] for image in images)]:
        match = re.search(r"[-:]v?(\d+\.\d+(?:\.\d+)?(?:-[0-9A-Za-z.-]+)?)$", text)
        if match:
            return match.group(1)
    return ""


def has_gates(version: str) -> bool:
    """Whether a release has gates for sharing. One that nobody can tell counts as having them."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        return True
    major, minor = int(match.group(1)), int(match.group(2))
    # 0.4 follows 25.12.
    return major == 0 or (major, minor) >= _FIRST_WITH_GATES


def helm_gates(mode: str, strategy: str, chart_version: str) -> Object:
    """Chart values that switch on what the mode needs; empty where nothing is to be switched."""
    if mode != "shared" or strategy not in GATES or not has_gates(str(chart_version).lstrip("v")):
        return {}
    return {"featureGates": dict.fromkeys(gates_for(strategy), True)}


def setting(gate: str) -> str:
    """How to switch a gate on, for a message."""
    return f"featureGates.{gate}=true"


def read_gates(plugin: Mapping[str, Any]) -> Object:
    """What a trimmed DaemonSet says: ``{version, has_gates, gates {name: bool}}``."""
    version = driver_version(str(plugin.get("chart") or ""), list(plugin.get("images") or []))
    return {
        "version": version,
        "has_gates": has_gates(version),
        "gates": parse_gates(str(plugin.get("feature_gates") or "")),
    }
