"""What the nodes of a lab should be, what they are, and what has to be done about it.

Pure: everything comes in as arguments and goes out as values. Controller only (Python 3.11+).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

LABEL_INSTANCE = "gpu-slices.lab"
LABEL_NODE = "gpu-slices.node"
LABEL_CONFIG = "gpu-slices.config"

CONTROL_SERVICES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_SERVICES = ("containerd", "kubelet", "kube-proxy")

# Where containerd keeps unpacked image layers, below its root.
SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs/snapshots"

_PLACEHOLDER = re.compile(r"@([A-Z][A-Z_]*)@")


class PlanError(Exception):
    """The description of the lab cannot be carried out; the text says what was found and what is needed."""


@dataclass(frozen=True)
class Node:
    """One node: its address is the `number`-th of the subnet, its pods get 10.244.<number>.0/24."""

    name: str
    number: int
    control: bool = False
    cards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What a container may have: open files, processes. `asked` false: Podman's own defaults do."""

    nofile: int
    nproc: int
    asked: bool = True


@dataclass(frozen=True)
class Lab:
    """Everything the nodes of one lab have in common."""

    instance: str
    subnet: str
    image: str
    run_dir: str
    nodes: tuple[Node, ...]
    limits: Limits
    kubernetes: bool = True
    masquerade: bool = False
    cluster_cidr: str = "10.244.0.0/16"
    service_cidr: str = "10.96.0.0/16"
    dns_address: str = "10.96.0.10"
    pause_image: str = ""
    silicon_dir: str = ""
    seed: str = ""
    layers: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        return f"gpu-slices-{self.instance}"

    def container(self, node: Node) -> str:
        return f"gpu-slices-{self.instance}-{node.name}"

    def address(self, node: Node) -> str:
        return str(ipaddress.ip_network(self.subnet)[node.number])

    def gateway(self) -> str:
        return str(ipaddress.ip_network(self.subnet)[1])

    def pod_cidr(self, node: Node) -> str:
        return pod_cidr(self.cluster_cidr, node.number)

    def control(self) -> Node | None:
        return next((node for node in self.nodes if node.control), None)


def pod_cidr(cluster_cidr: str, number: int) -> str:
    """The `number`-th /24 of the cluster's pod range."""
    network = ipaddress.ip_network(cluster_cidr)
    base = int(network.network_address) + (number << 8)
    return f"{ipaddress.ip_address(base)}/24"


def nodes_from(items: Iterable[Mapping[str, Any]], kubernetes: bool) -> tuple[Node, ...]:
    """Nodes as the role's input has them. Raises PlanError with every fault found."""
    nodes: list[Node] = []
    faults: list[str] = []
    for item in items:
        nodes.append(
            Node(
                name=str(item["name"]),
                number=int(item["number"]),
                control=bool(item.get("control") or False),
                cards=tuple(str(card) for card in item.get("cards") or ()),
            )
        )
    for node in nodes:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", node.name):
            faults.append(f"node name '{node.name}' is not a DNS label")
        if not 2 <= node.number <= 254:
            faults.append(f"node '{node.name}' has number {node.number}; needed: 2 to 254")
    for field in ("name", "number"):
        seen = [getattr(node, field) for node in nodes]
        for value in sorted({value for value in seen if seen.count(value) > 1}, key=str):
            faults.append(f"{field} {value} is used by {seen.count(value)} nodes")
    controls = [node.name for node in nodes if node.control]
    if kubernetes and len(controls) != 1:
        faults.append(
            f"found {len(controls)} control nodes ({', '.join(controls) or 'none'}); needed: exactly one"
        )
    if not nodes:
        faults.append("no nodes are given")
    if faults:
        raise PlanError("; ".join(faults))
    return tuple(nodes)


def overlaps(subnet: str, taken: Mapping[str, str]) -> list[str]:
    """Which of `taken` (network -> who has it) share addresses with `subnet`; default routes do not count."""
    wanted = ipaddress.ip_network(subnet)
    found = []
    for network, owner in taken.items():
        other = ipaddress.ip_network(network, strict=False)
        if other.version == wanted.version and other.prefixlen > 0 and other.overlaps(wanted):
            found.append(f"{network} ({owner})")
    return found


def routes(proc_net_route: str) -> dict[str, str]:
    """IPv4 routes of /proc/net/route: network -> interface."""
    result = {}
    for line in proc_net_route.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        destination, mask = (int.from_bytes(bytes.fromhex(fields[i]), "little") for i in (1, 7))
        prefix = bin(mask).count("1")
        result[f"{ipaddress.ip_address(destination)}/{prefix}"] = fields[0]
    return result


def limits(hard_nofile: int, hard_nproc: int, can_raise: bool) -> Limits:
    """Podman asks for a million files and its own number of processes, which takes CAP_SYS_RESOURCE.

    Without it only the present limits can be had, and Podman first lowers its own to 32768 processes.
    """
    if can_raise:
        return Limits(nofile=1048576, nproc=-1, asked=False)
    nofile = 1048576 if hard_nofile < 0 else hard_nofile
    nproc = 32768 if hard_nproc < 0 else min(32768, hard_nproc)
    return Limits(nofile=nofile, nproc=nproc)


def services(lab: Lab, node: Node) -> tuple[str, ...]:
    """What runit runs on the node, in the order in which it makes sense to read them."""
    if not lab.kubernetes:
        return ()
    return (CONTROL_SERVICES if node.control else ()) + NODE_SERVICES


def values(lab: Lab, node: Node) -> dict[str, str]:
    """The placeholders of lab/node for one node."""
    control = lab.control()
    boot = ""
    if node.cards:
        cards = ",".join(node.cards)
        boot = f"/opt/lab/silicon/lab-silicon init --root /driver-root --cards {cards} --link-host"
    taints = (
        [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}] if node.control else []
    )
    return {
        "NAME": node.name,
        "ADDRESS": lab.address(node),
        "KUBERNETES": "1" if lab.kubernetes else "0",
        "SERVICES": " ".join(services(lab, node)),
        "API": f"https://{lab.address(control)}:6443" if control else "",
        "POD_CIDR": lab.pod_cidr(node),
        "CLUSTER_CIDR": lab.cluster_cidr,
        "SERVICE_CIDR": lab.service_cidr,
        "ROUTES": " ".join(f"{lab.pod_cidr(n)}={lab.address(n)}" for n in lab.nodes if n != node),
        "MASQUERADE": "1" if lab.masquerade else "0",
        "BOOT": boot,
        "DNS_ADDRESS": lab.dns_address,
        "NOFILE": str(lab.limits.nofile),
        "TAINTS": json.dumps(taints),
        "PAUSE_IMAGE": lab.pause_image,
    }


def render(text: str, replacements: Mapping[str, str]) -> str:
    """Put values in for @NAME@. Raises PlanError for a name that has none."""

    def replace(match: re.Match[str]) -> str:
        if match[1] not in replacements:
            raise PlanError(
                f"placeholder @{match[1]}@ has no value; known: {', '.join(sorted(replacements))}"
            )
        return replacements[match[1]]

    return _PLACEHOLDER.sub(replace, text)


def credentials(node: Node) -> dict[str, str]:
    """Which files of the credentials directory a node is given: path in the node's /etc/lab -> path there."""
    files = {
        "pki/ca.crt": "ca.crt",
        "kubelet.conf": f"kubelet-{node.name}.conf",
        "kube-proxy.conf": "kube-proxy.conf",
    }
    if node.control:
        for name in ("apiserver", "apiserver-kubelet-client", "front-proxy-client"):
            files[f"pki/{name}.crt"] = f"{name}.crt"
            files[f"pki/{name}.key"] = f"{name}.key"
        for name in ("front-proxy-ca.crt", "sa.key", "sa.pub"):
            files[f"pki/{name}"] = name
        files["controller-manager.conf"] = "controller-manager.conf"
        files["scheduler.conf"] = "scheduler.conf"
    return files


def run_arguments(lab: Lab, node: Node, config: str) -> list[str]:
    """Arguments of `podman` that start the node's container."""
    home = f"{lab.run_dir}/{node.name}"
    limit = lab.limits
    arguments = [
        "run",
        "--detach",
        f"--name={lab.container(node)}",
        f"--hostname={node.name}",
        f"--label={LABEL_INSTANCE}={lab.instance}",
        f"--label={LABEL_NODE}={node.name}",
        f"--label={LABEL_CONFIG}={config}",
        f"--network={lab.network}",
        f"--ip={lab.address(node)}",
        "--privileged",
        "--cgroupns=private",
        "--systemd=false",
        "--sdnotify=ignore",
        "--log-driver=k8s-file",
        "--pids-limit=-1",
        "--tmpfs=/run:rw,exec,suid,dev,mode=755",
        "--env=PATH=/opt/lab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        f"--volume={home}/etc:/etc/lab:ro",
        f"--volume={home}/log:/var/log/lab",
        f"--volume={lab.run_dir}/bin:/opt/lab/bin:ro",
    ]
    if limit.asked:
        arguments += [
            f"--ulimit=nofile={limit.nofile}:{limit.nofile}",
            f"--ulimit=nproc={limit.nproc}:{limit.nproc}",
        ]
    arguments += [f"--add-host={other.name}:{lab.address(other)}" for other in lab.nodes if other != node]
    if lab.silicon_dir and node.cards:
        arguments.append(f"--volume={lab.silicon_dir}:/opt/lab/silicon:ro")
    if lab.kubernetes:
        # Kubelet and containerd make device nodes and set-uid files here, which Podman forbids on volumes.
        arguments += [
            f"--volume={home}/containerd:/var/lib/containerd:dev,suid,exec",
            f"--volume={home}/kubelet:/var/lib/kubelet:dev,suid,exec",
        ]
        # All nodes share one copy of the image layers, which nobody writes to.
        arguments += [
            f"--volume={lab.seed}/{SNAPSHOTS}/{layer}:/var/lib/containerd/{SNAPSHOTS}/{layer}:ro,dev,suid,exec"
            for layer in lab.layers
        ]
        if node.control:
            arguments.append(f"--volume={home}/etcd:/var/lib/etcd")
    return [*arguments, "--entrypoint=/etc/lab/entrypoint", lab.image]


def fingerprint(parts: Any) -> str:
    """Short hash of any JSON-able description."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Found:
    """A container of this lab as Podman and the process table show it."""

    name: str
    container_id: str
    config: str
    state: str
    alive: bool
    watched: bool

    @classmethod
    def of(cls, inspected: Mapping[str, Any], living: Iterable[int]) -> Found:
        """From one entry of `podman inspect`; `living` are the pids that exist."""
        state = inspected.get("State") or {}
        alive = set(living)
        labels = (inspected.get("Config") or {}).get("Labels") or {}
        return cls(
            name=str(inspected["Name"]),
            container_id=str(inspected["Id"]),
            config=str(labels.get(LABEL_CONFIG, "")),
            state=str(state.get("Status", "unknown")),
            alive=int(state.get("Pid") or 0) in alive,
            watched=int(state.get("ConmonPid") or 0) in alive,
        )


@dataclass(frozen=True)
class Step:
    """One node container to make or remove, and why."""

    action: str
    container: str
    reason: str


def plan(wanted: Mapping[str, str], found: Sequence[Found], fresh: str = "") -> list[Step]:
    """Steps from `found` to `wanted` (container name -> config hash), removals first; [] when all is well.

    `fresh` is a reason to make every container anew, if there is one.
    """
    remove: list[Step] = []
    create: list[Step] = []
    by_name = {container.name: container for container in found}
    for name in sorted(by_name):
        container = by_name[name]
        reason = fresh
        if name not in wanted:
            reason = "no longer wanted"
        elif container.state != "running":
            reason = f"is {container.state}, not running"
        elif not container.alive:
            reason = "said to be running, but its first process is gone"
        elif not container.watched:
            reason = "its monitor process (conmon) is gone"
        elif container.config != wanted[name]:
            reason = "made from another configuration"
        if reason:
            remove.append(Step("remove", name, reason))
    gone = {step.container: step.reason for step in remove}
    for name in wanted:
        if name not in by_name or name in gone:
            create.append(Step("create", name, gone.get(name, "missing")))
    return remove + create
