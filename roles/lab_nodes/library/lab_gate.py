"""Read-only: can this machine host the lab, and what does it offer."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.lab_host import HostError, containers, findings

DOCUMENTATION = """
module: lab_gate
short_description: Say whether this machine can host the lab
description:
  - Looks at platform, rights, Podman, cgroup controllers, subnet and disk, and reports all faults together.
  - Changes nothing.
options:
  instance: {description: Name of the lab., type: str, required: true}
  cache: {description: Folder for everything the lab keeps on disk., type: path, required: true}
  subnet: {description: Subnet for the nodes., type: str, required: true}
author: gpu-slices
"""
EXAMPLES = """
- name: Ask whether the lab can run here
  lab_gate:
    instance: lab
    cache: /var/cache/gpu-slices
    subnet: 10.77.0.0/24
"""
RETURN = """
findings: {description: A sentence a fault; empty when the lab can run here., returned: always, type: list}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "cache": {"type": "path", "required": True},
            "subnet": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    cache = Path(wanted["cache"])
    try:
        # A lab that stands has its room already.
        stands = (cache / "run" / wanted["instance"] / "marker").exists() and bool(
            containers(wanted["instance"])
        )
    except (HostError, ValueError):
        stands = False
    try:
        found = findings(cache, wanted["subnet"], f"gpu-slices-{wanted['instance']}", need_room=not stands)
    except (HostError, OSError, ValueError) as error:
        found = [f"found that Podman does not work: {error}; needed a working one: try `podman info` as root"]
    module.exit_json(changed=False, findings=found)


if __name__ == "__main__":
    main()
