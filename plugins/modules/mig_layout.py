#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read or change how the GPUs of a node are cut (MIG)."""

from __future__ import annotations

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.mig_geometry import LayoutError
from ansible.module_utils.gpu_slices.mig_layout import GpuPlan, GpuState, Want, describe, describe_after
from ansible.module_utils.gpu_slices.mig_node import (
    BusyError,
    ChangeError,
    Claim,
    NodePlan,
    RecordError,
    add_to_record,
    apply_plan,
    blockers,
    drop_from_record,
    locked,
    plan_node,
    read_gpus,
    read_record,
    record_path,
    remove_record,
    runner,
    wants_from_layout,
)
from ansible.module_utils.gpu_slices.nvidia_smi import NvidiaSmi, NvidiaSmiError

DOCUMENTATION = r"""
module: mig_layout
short_description: Read or change the MIG layout of a node's GPUs
description:
  - Compares the MIG mode and instances of every GPU with a layout in mig-parted's format.
  - Makes the smallest change. Existing instances that fit the layout are kept.
  - Nothing is touched when the GPUs already are as wanted.
  - Refuses to change a GPU, or to destroy an instance, in use or claimed, and names process, claim and pod.
  - A change that fails half-way is taken back.
  - Before a GPU is changed for the first time its layout is recorded; O(state=restored) puts it back.
options:
  config:
    description:
      - Entry list of one layout, a value of mig-parted's C(mig-configs).
      - Left out, the GPUs are only read.
    type: raw
  layout:
    description: Name of the layout, for messages.
    type: str
    default: ""
  state:
    description:
      - V(present) makes the GPUs as O(config) says, V(restored) puts the recorded layout back.
      - V(gathered) only reads.
    type: str
    choices: [present, restored, gathered]
    default: present
  claimed:
    description:
      - Devices of this node that pods hold by a ResourceClaim. They are kept even if no process uses them.
    type: list
    elements: dict
    default: []
    suboptions:
      uuid:
        description: UUID of a MIG device or a whole GPU. Empty = any device of this node.
        type: str
        required: true
      holder:
        description: Claim and pods, for messages.
        type: str
        required: true
  nvidia_smi:
    description: Program to call.
    type: str
    default: nvidia-smi
  record_dir:
    description: Folder on the node for the record of former layouts.
    type: path
    default: /var/lib/gpu-slices
  reset:
    description: Reset an idle GPU when a mode change needs it (Ampere).
    type: bool
    default: true
  timeout:
    description: Seconds that one call of nvidia-smi may take.
    type: int
    default: 120
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: gpu-slices
"""

EXAMPLES = r"""
- name: Cut every A30 into four slices
  mig_layout:
    layout: all-1g.6gb
    config:
      - device-filter: "0x20B710DE"
        devices: all
        mig-enabled: true
        mig-devices: {1g.6gb: 4}

- name: Put back what was there before
  mig_layout:
    state: restored
"""

RETURN = r"""
gpus:
  description: Every GPU of the node as it is at the end (in check mode, as it is now).
  returned: always
  type: list
  elements: dict
plan:
  description: Per GPU what is kept, destroyed and created, and the steps in order.
  returned: always
  type: list
  elements: dict
done:
  description: Steps that were carried out.
  returned: always
  type: list
  elements: str
record:
  description: Path of the record of former layouts, empty when there is none.
  returned: always
  type: str
"""


def gpu_result(gpu: GpuState) -> dict[str, Any]:
    """A GPU as the module returns it; one row of ``mig_devices`` per compute instance."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pci_bus_id": gpu.pci_bus_id,
        "pci_device_id": gpu.pci_device_id,
        "memory_mib": gpu.memory_mib,
        "mig_mode_current": gpu.mode_current,
        "mig_mode_pending": gpu.mode_pending,
        "mig_devices": [
            {
                "uuid": compute.uuid,
                "profile": compute.profile,
                "gi_id": item.gi_id,
                "ci_id": compute.ci_id,
                "gi_profile_id": item.profile_id,
                "placement_start": item.start,
                "placement_size": item.size,
            }
            for item in gpu.instances
            for compute in item.compute
        ],
    }


def plan_result(plan: GpuPlan) -> dict[str, Any]:
    """A plan as the module returns it."""
    return {
        "index": plan.state.index,
        "uuid": plan.state.uuid,
        "name": plan.state.name,
        "keep": [{"profile": i.profile, "gi_id": i.gi_id, "placement_start": i.start} for i in plan.keep],
        "destroy": [
            {"profile": i.profile, "gi_id": i.gi_id, "placement_start": i.start} for i in plan.destroy
        ],
        "create": [{"profile": p.profile.name, "placement_start": p.start} for p in plan.create],
        "steps": [str(step) for step in plan.steps],
    }


def diff_result(plan: GpuPlan) -> dict[str, str]:
    """Before and after of one GPU in Ansible's diff format."""
    header = f"{plan.state.label} {plan.state.uuid}"
    return {
        "before_header": header,
        "after_header": header,
        "before": describe(plan.state),
        "after": describe_after(plan),
    }


def change_message(error: ChangeError) -> str:
    """Everything a person must know after a failed change, in one text."""
    lines = [f"The MIG layout could not be changed. Failed step: {error.failed}."]
    lines.append(f"Done before it: {'; '.join(error.done) or 'nothing'}.")
    if error.made or error.lost:
        lines.append(f"Made by this run: {', '.join(error.made) or 'nothing'}.")
        lines.append(f"Destroyed by this run: {', '.join(error.lost) or 'nothing'}.")
    if error.restored:
        lines.append("The former layout is back: nothing of this change is left.")
    else:
        lines.append(f"The former layout could not be put back: {error.restore_error}.")
        lines.append("The GPUs are now:\n" + "".join(describe(gpu) for gpu in error.gpus))
    if error.fix:
        lines.append(f"What to do: {error.fix}")
    return "\n".join(lines)


class Run:
    """One call of the module."""

    def __init__(self, module: AnsibleModule, result: dict[str, Any]) -> None:
        self.module = module
        self.params = module.params
        self.folder = os.path.abspath(self.params["record_dir"])
        self.smi = NvidiaSmi(runner(self.params["nvidia_smi"], self.params["timeout"]))
        self.result = result
        self.claims = [Claim(item["uuid"], item["holder"]) for item in self.params["claimed"]]

    def __call__(self) -> None:
        gpus = read_gpus(self.smi)
        self._show(gpus)
        wants = self._wants(gpus)
        if wants is None:
            self.module.exit_json(**self.result)
            return
        plan = self._plan(gpus, wants)
        if self.module.check_mode:
            for reason in blockers(plan):
                self.module.warn(f"This change would be refused: {reason}")
        elif plan.pending:
            if blockers(plan):
                raise BusyError(blockers(plan))
            with locked(self.folder, self.params["timeout"]):
                # another run may have held the lock: what was read before it is no longer sure
                self._change(self._plan(read_gpus(self.smi), wants))
        if self.params["state"] == "restored" and os.path.exists(record_path(self.folder)):
            self.result["changed"] = True
            if not self.module.check_mode:
                remove_record(self.folder)
                self.result["record"] = ""
        self.module.exit_json(**self.result)

    def _plan(self, gpus: list[GpuState], wants: dict[int, Want]) -> NodePlan:
        plan: NodePlan = plan_node(self.smi, gpus, wants, self.claims)
        self.result["plan"] = [plan_result(item) for item in plan.plans]
        self.result["diff"] = [diff_result(item) for item in plan.pending]
        self.result["changed"] = bool(plan.pending)
        return plan

    def _show(self, gpus: list[GpuState]) -> None:
        self.result["gpus"] = [gpu_result(gpu) for gpu in gpus]
        path = record_path(self.folder)
        self.result["record"] = path if os.path.exists(path) else ""

    def _wants(self, gpus: list[GpuState]) -> dict[int, Want] | None:
        """What the GPUs shall be by index, or None when they are only to be read."""
        state, config = self.params["state"], self.params["config"]
        if state == "restored":
            recorded = read_record(self.folder)
            if recorded is None:
                return None
            present = {gpu.uuid: gpu.index for gpu in gpus}
            for uuid in sorted(set(recorded) - set(present)):
                self.module.warn(
                    f"The recorded GPU {uuid} is not in this node any more; its layout is dropped."
                )
            return {present[uuid]: want for uuid, want in recorded.items() if uuid in present}
        if state == "gathered" or config is None:
            return None
        wants: dict[int, Want] = wants_from_layout(self.params["layout"], config, gpus)
        return wants

    def _change(self, plan: NodePlan) -> None:
        if blockers(plan):
            raise BusyError(blockers(plan))
        recorded: list[str] = []
        if self.params["state"] == "present":
            recorded = add_to_record(self.folder, [item.state for item in plan.pending])
        try:
            gpus, self.result["done"] = apply_plan(self.smi, plan, self.params["reset"])
        except ChangeError as error:
            if error.restored and recorded:
                drop_from_record(self.folder, recorded)
            self._show(error.gpus)
            self.result["done"] = error.done
            self.result["changed"] = not error.restored
            raise
        self._show(gpus)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "raw"},
            "layout": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "restored", "gathered"], "default": "present"},
            "claimed": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "uuid": {"type": "str", "required": True},
                    "holder": {"type": "str", "required": True},
                },
            },
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "record_dir": {"type": "path", "default": "/var/lib/gpu-slices"},
            "reset": {"type": "bool", "default": True},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    result: dict[str, Any] = {"changed": False, "gpus": [], "plan": [], "done": [], "record": ""}
    try:
        Run(module, result)()
    except LayoutError as error:
        named = f"Layout {module.params['layout']!r}" if module.params["layout"] else "This layout"
        module.fail_json(msg=f"{named} cannot be had here:\n- " + "\n- ".join(error.faults), changed=False)
    except BusyError as error:
        module.fail_json(msg="Nothing was changed.\n" + "\n".join(error.reasons), changed=False)
    except ChangeError as error:
        shown = {key: result[key] for key in ("changed", "done", "gpus", "record")}
        module.fail_json(msg=change_message(error), **shown)
    except RecordError as error:
        module.fail_json(msg=str(error), changed=bool(result["done"]))
    except NvidiaSmiError as error:
        what = f" What to do: {error.fix}" if error.fix else ""
        module.fail_json(msg=f"{error}.{what}", changed=False)


if __name__ == "__main__":
    main()
