"""Filters about the run and its inventory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import inputs
from gpu_slices.mig_layout import merge_configs


def nodes(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, str]:
    """The Kubernetes node of each host: ``gpu_slices_node_name``, or the inventory's own name."""
    return {str(host): str(hostvars[host].get("gpu_slices_node_name") or host) for host in hosts}


def layouts(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, list[str]]:
    """The MIG profiles that the inventory's layouts cut, for each host whose layout is managed."""
    answer: dict[str, list[str]] = {}
    for host in hosts:
        mine = hostvars[host]
        source = str(mine.get("mig_config_file") or "")
        content = None
        if source:
            content = yaml.safe_load(Path(source).expanduser().read_text(encoding="utf-8"))
        if inputs.manages_layout(mine):
            configs = merge_configs(mine.get("mig_configs") or {}, content, source)
            answer.update(inputs.wanted_profiles(configs, {str(host): str(mine.get("mig_config") or "")}))
    return answer


class FilterModule:
    """``gpu_slices_stages``: the stages that tags select. ``gpu_slices_nodes``: host -> Kubernetes node.

    ``gpu_slices_layouts``: host -> profiles that its layout cuts.
    """

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "gpu_slices_stages": inputs.chosen_stages,
            "gpu_slices_nodes": nodes,
            "gpu_slices_layouts": layouts,
        }
