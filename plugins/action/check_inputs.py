"""Gate 1: everything that can be wrong in an inventory, found without asking a cluster or a node.

Arguments: ``settings`` (the shared variables), ``stages`` (those that this play is for; of them count
those that the tags of the run select; empty: all that they select), ``roles_path`` (the directory whose
``*/meta/argument_specs.yml`` say which variables exist and of what type). It looks at every host of the node
group and at localhost, checks names, types and layouts, and fails once with all faults. No connection is
opened.

Sets the fact ``gpu_slices_inputs``: ``stages``; ``nodes`` {host: Kubernetes node}; ``layouts`` {host:
[profiles that its MIG layout cuts]}, for hosts whose layout is ours to cut.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import callers, crowd, inputs, kueue, recipe, shared
from gpu_slices.mig_geometry import LayoutError
from gpu_slices.mig_layout import layout_faults, merge_configs

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ActionModule(ActionBase):  # type: ignore[misc]
    """See the module's docstring."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Fail with one message when there are faults."""
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                "settings": {"type": "dict", "required": True},
                "stages": {"type": "list", "elements": "str", "default": []},
                "roles_path": {"type": "path", "required": True},
            }
        )
        variables = task_vars or {}
        settings = arguments["settings"]
        tags, skipped = variables["ansible_run_tags"], variables["ansible_skip_tags"]
        mode = str(settings["gpu_slices_mode"])
        chosen = inputs.chosen_stages(tags, skipped, arguments["stages"], mode)
        # This runs in every play, also in those of stages that the tags leave out.
        stages = [stage for stage in arguments["stages"] or chosen if stage in chosen]
        # Every role depends on gate 1, so a run comes here once a play; looking again would find the same.
        # The parent is the process of this run: facts that a cache kept from another run do not count.
        mark = [os.getppid(), settings]
        before = variables["hostvars"]["localhost"].get("ansible_facts", {}).get("gpu_slices_inputs") or {}
        if before.get("mark") == mark and set(stages) <= set(before["stages"]):
            return {"changed": False, "ansible_facts": {"gpu_slices_inputs": before}}
        group = str(settings["gpu_slices_node_group"])
        faults = inputs.node_group_faults(group, variables["groups"])
        hosts = list(variables["groups"].get(group) or [])
        values, found = self._values(variables, hosts, _specs(Path(arguments["roles_path"])))
        faults += found
        gpu = {host: values[host] for host in hosts}
        nodes = {host: str(mine.get("gpu_slices_node_name") or host) for host, mine in gpu.items()}
        layouts, found = _layouts(gpu, settings)
        faults += inputs.duplicate_node_faults(nodes) + found
        mine = values[variables["inventory_hostname"]]
        faults += shared.mode_faults(mode, "gpu_slices_mode" in mine)
        if boolean(mine.get("dra_driver_install", False), strict=False):
            namespace = str(mine.get("dra_driver_namespace") or "")
            faults += inputs.driver_faults(mine.get("dra_driver_values"), namespace, layouts)
            faults += shared.gate_faults(mine, mode)
        faults += shared.input_faults(mine, mode, str(settings["gpu_slices_profile"]))
        if "crowd" in stages:
            faults += crowd.faults({**settings, **mine})
        if "callers" in stages:
            faults += callers.faults(mine)
        if "quota" in stages:
            faults += kueue.input_faults(mine)
        if "recipe" in stages:
            faults += recipe.faults({**settings, **mine})
        faults += inputs.value_faults(settings, stages)
        faults += dict.fromkeys(fault for one in values.values() for fault in inputs.number_faults(one))
        faults += inputs.resource_faults(mine)
        faults += inputs.label_faults(mine.get("gpu_nodes_labels"))
        message = inputs.compose(faults)
        if message:
            return {"changed": False, "failed": True, "msg": message}
        # Looking at the variables of all hosts is dear, so what later tasks need of them is kept.
        told = {"nodes": nodes, "layouts": layouts, "stages": stages, "mark": mark}
        return {"changed": False, "ansible_facts": {"gpu_slices_inputs": told}}

    def _values(
        self, variables: dict[str, Any], hosts: list[str], specs: dict[str, Any]
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """The values of our variables, host by host, and the faults in their names and types."""
        hostvars = variables["hostvars"]
        # localhost may be implicit: it is no member of a group then, yet extra variables show there.
        looked_at = [variables["inventory_hostname"], *hosts]
        values: dict[str, dict[str, Any]] = {}
        names: dict[str, list[str]] = {}
        faults: list[str] = []
        for host in dict.fromkeys(looked_at):
            mine = hostvars[host]
            names[host] = [str(name) for name in mine]
            values[host] = {}
            for name in names[host]:
                if name in specs:
                    try:
                        values[host][name] = mine[name]
                    except AnsibleError as error:
                        faults.append(f"Variable {name} ({host}) cannot be evaluated: {error.message}")
        allowed = {
            str(item) for mine in values.values() for item in mine.get("gpu_slices_extra_variables") or []
        }
        faults += inputs.unknown_variables(names, specs, allowed)
        faults += _type_faults(values, specs)
        return values, faults


def _specs(roles: Path) -> dict[str, Any]:
    """Every variable that a role takes: name -> its argument spec."""
    options: dict[str, Any] = {}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        with path.open(encoding="utf-8") as handle:
            document = yaml.load(handle, Loader=_LOADER)  # noqa: S506 - both loaders are safe ones
        for entry in (document or {}).get("argument_specs", {}).values():
            options.update(entry.get("options") or {})
    return options


def _type_faults(values: dict[str, dict[str, Any]], specs: dict[str, Any]) -> list[str]:
    """What the argument specs say about the values given; hosts with one fault are named together."""
    hosts_by_fault: dict[str, list[str]] = {}
    for host, mine in values.items():
        for name, value in mine.items():
            if name not in specs:
                continue
            spec = {key: item for key, item in specs[name].items() if key not in ("description", "default")}
            if spec.get("type") == "dict" and isinstance(value, str):
                # The validator would take '{...}' for what it says; the roles get the text itself.
                message = (
                    f"{name} is text: needed is a mapping; on the command line: -e '{{\"{name}\": ...}}'."
                )
                hosts_by_fault.setdefault(message, []).append(host)
                continue
            outcome = ArgumentSpecValidator({name: spec}).validate({name: value})
            for message in outcome.error_messages:
                hosts_by_fault.setdefault(message, []).append(host)
    return [f"Hosts {', '.join(hosts)}: {message}" for message, hosts in hosts_by_fault.items()]


def _layouts(
    gpu: dict[str, dict[str, Any]], settings: dict[str, Any]
) -> tuple[dict[str, list[str]], list[str]]:
    """The profiles that each host's layout cuts; and the layouts that are wrong."""
    faults: dict[str, None] = {}
    wanted: dict[str, list[str]] = {}
    managed = {host: mine for host, mine in gpu.items() if inputs.manages_layout(mine)}
    faults.update(dict.fromkeys(inputs.reach_faults(gpu)))
    # Hosts mostly share their layouts: those that do are judged together, so that a fault is told once.
    together: list[tuple[dict[str, Any], list[str]]] = []
    for host, mine in managed.items():
        try:
            configs = _configs(mine)
        except OSError as error:
            faults[f"{host}: mig_config_file {error.filename} cannot be read: {error.strerror}."] = None
            continue
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            faults[f"{host}: mig_config_file {mine['mig_config_file']} is not valid YAML: {reason}"] = None
            continue
        except LayoutError as error:
            faults.update(dict.fromkeys(f"{host}: {fault}" for fault in error.faults))
            continue
        for known, hosts in together:
            if known == configs:
                hosts.append(host)
                break
        else:
            together.append((configs, [host]))
    for configs, hosts in together:
        assignments = {host: str(managed[host].get("mig_config") or "") for host in hosts}
        models = {host: managed[host].get("mig_gpu_models") or [] for host in hosts}
        faults.update(dict.fromkeys(layout_faults(configs, assignments, models)))
        wanted.update(inputs.wanted_profiles(configs, assignments))
    if faults or len(managed) < len(gpu):
        return wanted, list(faults)
    profile, memory = str(settings["gpu_slices_profile"]), str(settings["gpu_slices_memory"])
    return wanted, inputs.profile_faults(profile, memory, wanted)


def _configs(mine: dict[str, Any]) -> dict[str, Any]:
    source = str(mine.get("mig_config_file") or "")
    content = None
    if source:
        with Path(source).expanduser().open(encoding="utf-8") as handle:
            content = yaml.load(handle, Loader=_LOADER)  # noqa: S506
    return merge_configs(mine.get("mig_configs") or {}, content, source)
