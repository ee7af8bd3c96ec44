"""Version strings as Kubernetes, container runtimes and NVIDIA drivers write them, compared as numbers.

Vendors hang their own build on a version (``v1.36.0-gke.1379000``, ``v1.34.4+k3s1``). Read as semantic
versions those would be pre-releases, lower than the release they contain; read as text ``1.34.10`` is
below ``1.34.2``. Neither is meant here.
"""

from __future__ import annotations

import re
from typing import Tuple

Version = Tuple[int, ...]

# resource.k8s.io/v1 came with 1.34.0; NVIDIA's DRA driver documents 1.34.2 as the lowest it supports.
KUBERNETES_NEEDED: Version = (1, 34)
KUBERNETES_ADVISED: Version = (1, 34, 2)
NVIDIA_ADVISED: Version = (565,)
CONTAINERD_CDI: Version = (1, 7)
CONTAINERD_CDI_ALWAYS: Version = (2, 0)
CRIO_CDI: Version = (1, 23)

_LEADING = re.compile(r"^v?(\d+(?:\.\d+)*)")
_RUNTIME = re.compile(r"^([a-z][a-z0-9-]*)://(.+)$")


def parse_version(text: str) -> Version:
    """The leading numbers: ``v1.34.2-gke.1`` is (1, 34, 2). Raises ValueError if there are none."""
    match = _LEADING.match(str(text).strip())
    if not match:
        raise ValueError(f"'{text}' does not start with a version number")
    return tuple(int(part) for part in match.group(1).split("."))


def at_least(text: str, floor: Version) -> bool:
    """Whether a version is not below ``floor``; missing parts count as zero."""
    version = parse_version(text)
    width = max(len(version), len(floor))
    return version + (0,) * (width - len(version)) >= floor + (0,) * (width - len(floor))


def show(version: Version) -> str:
    """``(1, 34, 2)`` as ``1.34.2``."""
    return ".".join(str(part) for part in version)


def kubernetes_verdict(text: str) -> str:
    """``pass``, ``warn`` (serves the API, below the driver's documented floor) or ``fail``."""
    try:
        if not at_least(text, KUBERNETES_NEEDED):
            return "fail"
        return "pass" if at_least(text, KUBERNETES_ADVISED) else "warn"
    except ValueError:
        return "fail"


def runtime_cdi(runtime: str) -> tuple[str, str]:
    """Whether a node's container runtime injects CDI devices.

    ``runtime`` is ``status.nodeInfo.containerRuntimeVersion``. Returns a verdict (pass, warn, fail) and the
    reason. ``warn`` means that a setting on the node decides, which the API does not show.
    """
    match = _RUNTIME.match(str(runtime))
    if not match:
        return "fail", f"'{runtime}' names no container runtime"
    name, version = match.groups()
    try:
        if name == "containerd":
            if at_least(version, CONTAINERD_CDI_ALWAYS):
                return "pass", f"containerd {version} has CDI on"
            if at_least(version, CONTAINERD_CDI):
                return "warn", (
                    f"containerd {version} injects CDI devices only with enable_cdi = true "
                    'under plugins."io.containerd.grpc.v1.cri"'
                )
            return "fail", f"containerd {version} drops CDI devices without an error"
        if name == "cri-o":
            if at_least(version, CRIO_CDI):
                return "pass", f"CRI-O {version} has CDI on"
            return "fail", f"CRI-O {version} has no CDI"
    except ValueError as error:
        return "fail", str(error)
    return "fail", f"{name} does not inject CDI devices into pods"
