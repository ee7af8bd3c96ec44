"""The lab's node containers: as described, or gone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Mapping

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.lab_host import (
    HostError,
    boot_id,
    bridge_firewall,
    containers,
    host_limits,
    living_pids,
    network,
    only_one,
    plant_seed,
    remove_container,
    remove_tree,
    run,
    snapshot_names,
    sweep_cgroups,
)
from ansible.module_utils.lab_plan import (
    LABEL_INSTANCE,
    Found,
    Lab,
    Node,
    PlanError,
    Step,
    credentials,
    fingerprint,
    nodes_from,
    plan,
    render,
    run_arguments,
    values,
)

DOCUMENTATION = """
module: lab_nodes
short_description: Make the lab's node containers what they should be
description:
  - Compares the containers of one lab with their description and makes, remakes or removes only what differs.
  - A container that is not running, has lost its monitor or was made from other settings is made anew.
  - Every node's files are rendered on the host and mounted read-only, so nothing is run inside to set it up.
options:
  instance: {description: Name of the lab., type: str, required: true}
  state: {description: Whether the lab should stand., type: str, choices: [present, absent], default: present}
  run_dir: {description: Folder for this lab's own files., type: path, required: true}
  subnet: {description: Subnet for the nodes., type: str}
  kubernetes: {description: Whether the nodes form a cluster., type: bool, default: true}
  nodes: {description: "Nodes: name, number, control, cards.", type: list, elements: dict}
  image: {description: Image of the nodes in Podman's storage., type: str}
  template: {description: Folder with the nodes' files., type: path}
  programs: {description: Programs for the nodes, name to path., type: dict, default: {}}
  charts: {description: Helm charts, name to folder., type: dict, default: {}}
  credentials: {description: Folder with certificates and kubeconfigs., type: path}
  seed: {description: Container store that already holds all images., type: path}
  seed_copies: {description: Its files that are written in place., type: list, elements: str, default: []}
  pause_image: {description: Image of pod sandboxes., type: str, default: ""}
  silicon: {description: Folder with the emulated GPU's programs., type: path}
author: gpu-slices
"""
EXAMPLES = """
- name: Take the lab away
  lab_nodes:
    instance: lab
    state: absent
    run_dir: /var/cache/gpu-slices/run/lab
"""
RETURN = """
steps: {description: What was done, or would be in check mode., returned: always, type: list, elements: str}
started: {description: Names of the nodes that were started., returned: always, type: list, elements: str}
since: {description: "When this began, seconds since 1970.", returned: always, type: float}
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "run_dir": {"type": "path", "required": True},
            "subnet": {"type": "str"},
            "kubernetes": {"type": "bool", "default": True},
            "nodes": {"type": "list", "elements": "dict"},
            "image": {"type": "str"},
            "template": {"type": "path"},
            "programs": {"type": "dict", "default": {}},
            "charts": {"type": "dict", "default": {}},
            "credentials": {"type": "path"},
            "seed": {"type": "path"},
            "seed_copies": {"type": "list", "elements": "str", "default": []},
            "pause_image": {"type": "str", "default": ""},
            "silicon": {"type": "path"},
        },
        required_if=[("state", "present", ("subnet", "nodes", "image", "template"))],
        supports_check_mode=True,
    )
    since = time.time()
    started: list[str] = []
    try:
        with only_one(Path(module.params["run_dir"])):
            if module.params["state"] == "absent":
                steps = absent(module.params, module.check_mode)
            else:
                steps, started = present(module.params, module.check_mode)
    except (HostError, PlanError, OSError) as error:
        module.fail_json(msg=f"The lab's nodes: {error}")
    module.exit_json(changed=bool(steps), steps=steps, started=started, since=since)


def present(wanted: Mapping[str, Any], check_mode: bool) -> tuple[list[str], list[str]]:
    lab = Lab(
        instance=wanted["instance"],
        subnet=wanted["subnet"],
        image=wanted["image"],
        run_dir=wanted["run_dir"],
        nodes=nodes_from(wanted["nodes"], wanted["kubernetes"]),
        limits=host_limits(),
        kubernetes=wanted["kubernetes"],
        masquerade=bridge_firewall(),
        pause_image=wanted["pause_image"],
        silicon_dir=wanted["silicon"] or "",
        seed=wanted["seed"] or "",
        layers=snapshot_names(Path(wanted["seed"])) if wanted["seed"] else (),
    )
    run_dir = Path(lab.run_dir)
    files = {node.name: node_files(lab, node, wanted) for node in lab.nodes}
    configs = {lab.container(node): node_config(lab, node, files[node.name], wanted) for node in lab.nodes}

    # A store from before a reboot may be torn (etcd does not wait for the disk), and one of another authority
    # is of no use.
    authority = (Path(wanted["credentials"]) / "ca.crt").read_text() if lab.kubernetes else ""
    marker = fingerprint([boot_id(), authority])
    marker_file = run_dir / "marker"
    known = marker_file.read_text() if marker_file.exists() else ""

    inspected = containers(lab.instance)
    living = living_pids()
    found = [Found.of(item, living) for item in inspected]
    fresh = "" if known == marker else "the machine was restarted or the certificates are new"
    existing = network(lab.network)
    if existing and not network_fits(lab, existing):
        fresh = fresh or "the network has other settings"
    steps = plan(configs, found, fresh)
    texts = [f"{step.action} {step.container}: {step.reason}" for step in steps]
    if not existing:
        texts.insert(0, f"create network {lab.network}")
    if check_mode or not texts:
        return texts, []

    paths = {item["Name"]: str((item.get("State") or {}).get("CgroupPath") or "") for item in inspected}
    remove_all([step for step in steps if step.action == "remove"], paths)
    if fresh:
        marker_file.unlink(missing_ok=True)
        for node in lab.nodes:
            remove_tree(run_dir / node.name)
    run_dir.mkdir(parents=True, exist_ok=True)
    link_programs(run_dir, wanted["programs"], wanted["charts"])
    make_network(lab, existing)
    marker_file.write_text(marker)

    made = {step.container for step in steps if step.action == "create"}
    todo = [node for node in lab.nodes if lab.container(node) in made]
    with ThreadPoolExecutor(max_workers=8) as pool:
        for future in [
            pool.submit(start, lab, node, files[node.name], configs[lab.container(node)], wanted)
            for node in todo
        ]:
            future.result()
    return texts, [node.name for node in todo]


def node_files(lab: Lab, node: Node, wanted: Mapping[str, Any]) -> dict[str, tuple[bytes, int]]:
    """What lies in the node's /etc/lab: relative path -> (content, mode)."""
    template = Path(wanted["template"])
    replacements = values(lab, node)
    files: dict[str, tuple[bytes, int]] = {}
    for path in sorted(template.rglob("*")):
        if not path.is_file():
            continue
        relative = str(path.relative_to(template))
        if relative.endswith(".in"):
            files[relative.removesuffix(".in")] = (render(path.read_text(), replacements).encode(), 0o644)
        else:
            files[relative] = (path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)
    if lab.kubernetes:
        for relative, source in credentials(node).items():
            files[relative] = ((Path(wanted["credentials"]) / source).read_bytes(), 0o600)
    return files


def node_config(
    lab: Lab, node: Node, files: Mapping[str, tuple[bytes, int]], wanted: Mapping[str, Any]
) -> str:
    """Hash of everything the container is made from."""
    config: str = fingerprint(
        {
            "run": run_arguments(lab, node, ""),
            "files": {name: [hashlib.sha256(body).hexdigest(), mode] for name, (body, mode) in files.items()},
            "programs": wanted["programs"],
        }
    )
    return config


def network_fits(lab: Lab, existing: Mapping[str, Any]) -> bool:
    subnets = [subnet.get("subnet") for subnet in existing.get("subnets") or []]
    return subnets == [lab.subnet] and bool(existing.get("internal"))


def make_network(lab: Lab, existing: Mapping[str, Any] | None) -> None:
    """An internal network: no way out, no rules in the host's firewall."""
    if existing and network_fits(lab, existing):
        return
    if existing:
        run(["podman", "network", "rm", "--force", lab.network])
    # Podman turns forwarding on for the whole machine; what it was is put back by `absent`.
    note = Path(lab.run_dir).parent / "ip_forward"
    if not note.exists():
        note.write_text(Path("/proc/sys/net/ipv4/ip_forward").read_text())
    run(
        [
            "podman",
            "network",
            "create",
            "--internal",
            "--disable-dns",
            f"--subnet={lab.subnet}",
            f"--gateway={lab.gateway()}",
            f"--label={LABEL_INSTANCE}={lab.instance}",
            lab.network,
        ]
    )


def remove_all(steps: list[Step], cgroup_paths: Mapping[str, str]) -> None:
    with ThreadPoolExecutor(max_workers=8) as pool:
        for future in [
            pool.submit(remove_container, step.container, cgroup_paths.get(step.container, ""))
            for step in steps
        ]:
            future.result()


def link_programs(run_dir: Path, programs: Mapping[str, str], charts: Mapping[str, str]) -> None:
    """Stable names for what the build keeps under hashed ones: bin/<program> (hard links), charts/<name>.

    A bin folder that is right stays: running nodes have it mounted.
    """
    (run_dir / "charts").mkdir(exist_ok=True)
    for name, source in charts.items():
        link = run_dir / "charts" / name
        if not link.is_symlink() or os.readlink(link) != source:
            link.unlink(missing_ok=True)
            link.symlink_to(source)
    current = run_dir / "bin"
    present_names = {path.name for path in current.glob("*")}
    if (
        current.is_dir()
        and present_names == set(programs)
        and all(same_file(current / name, Path(programs[name])) for name in programs)
    ):
        return
    scratch = run_dir / "bin.part"
    remove_tree(scratch)
    scratch.mkdir()
    for name, source in programs.items():
        try:
            os.link(source, scratch / name)
        except OSError:
            shutil.copy2(source, scratch / name)
    remove_tree(current)
    scratch.rename(current)


def same_file(first: Path, second: Path) -> bool:
    """Hard links of one file, or copies of equal size and time."""
    one, two = first.stat(), second.stat()
    return os.path.samestat(one, two) or (one.st_size, int(one.st_mtime)) == (two.st_size, int(two.st_mtime))


def start(
    lab: Lab, node: Node, files: Mapping[str, tuple[bytes, int]], config: str, wanted: Mapping[str, Any]
) -> None:
    """Lay out the node's folders and start its container. The API server's store outlives the container."""
    home = Path(lab.run_dir) / node.name
    for name in ("etc", "log", "kubelet", "containerd"):
        remove_tree(home / name)
    for name in ("etc", "log", "kubelet", "containerd", "etcd"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "etcd").chmod(0o700)
    for relative, (body, mode) in files.items():
        path = home / "etc" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        path.chmod(mode)
    if lab.kubernetes and wanted["seed"]:
        plant_seed(Path(wanted["seed"]), home / "containerd", wanted["seed_copies"])
    command = ["podman", *run_arguments(lab, node, config)]
    try:
        run(command)
    except HostError:
        # A `podman run` that was killed leaves its name or address taken; both go with what is left of it.
        name = lab.container(node)
        run(["podman", "rm", "--force", "--time=0", "--volumes", name], check=False)
        run(["podman", "rm", "--force", "--storage", name], check=False)
        run(command)


def absent(wanted: Mapping[str, Any], check_mode: bool) -> list[str]:
    """Take away containers, network, cgroups and node files; certificates and caches stay."""
    instance = wanted["instance"]
    run_dir = Path(wanted["run_dir"])
    name = f"gpu-slices-{instance}"
    inspected = containers(instance)
    steps = [Step("remove", item["Name"], "not wanted") for item in inspected]
    texts = [f"remove {step.container}" for step in steps]
    if network(name):
        texts.append(f"remove network {name}")
    leftovers = [path for path in sorted(run_dir.glob("*")) if path.name != "pki"]
    texts += [f"remove {path}" for path in leftovers]
    forward = run_dir.parent / "ip_forward"
    if check_mode or not (texts or forward.exists()):
        return texts
    remove_all(
        steps, {item["Name"]: str((item.get("State") or {}).get("CgroupPath") or "") for item in inspected}
    )
    if network(name):
        run(["podman", "network", "rm", "--force", name])
    for path in leftovers:
        remove_tree(path)
    with contextlib.suppress(OSError):
        run_dir.rmdir()
    sweep_cgroups()
    restore_forwarding(forward)
    return texts


def restore_forwarding(note: Path) -> None:
    """Put the machine's forwarding switch back, unless another container needs it."""
    if not note.exists():
        return
    busy = run(["podman", "ps", "--quiet"], check=False).stdout.split()
    if note.read_text().strip() == "0" and not busy:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
    if not busy:
        note.unlink()


if __name__ == "__main__":
    main()
