"""What the machine must have before anything is built; pure functions over facts, each fault one message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MINIMUM_DISK_GIB = 8.0

# From this version on the go command can fetch a newer toolchain for itself.
FIRST_SWITCHING_GO = (1, 21)


@dataclass(frozen=True)
class Tool:
    """A program or file that building or running the lab needs, and the Debian package that has it."""

    package: str
    probe: str  # a program's name, or an absolute path when the package has no program


TOOLS = (
    Tool("podman", "podman"),
    Tool("runc", "runc"),
    # Podman's better network backend, which it only recommends.
    Tool("netavark", "/usr/lib/podman/netavark"),
    Tool("containernetworking-plugins", "/usr/lib/cni/bridge"),
    Tool("iptables", "iptables"),
    Tool("mmdebstrap", "mmdebstrap"),
    Tool("debian-archive-keyring", "/usr/share/keyrings/debian-archive-keyring.gpg"),
    Tool("gcc", "gcc"),
    Tool("libc6-dev", "/usr/include/stdio.h"),
    Tool("make", "make"),
    Tool("util-linux", "setpriv"),
)
PIP = Tool("python3-venv", "pip")


def version_numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a Go version: "go1.26.8" and "1.26.8" give (1, 26, 8), "" gives ()."""
    match = re.match(r"(?:go)?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def wanted_go(modules: Iterable[Path]) -> str:
    """The newest Go that any of the go.mod files asks for, such as "1.26.0"."""
    versions = []
    for module in modules:
        match = re.search(r"^go (\S+)$", module.read_text(), re.MULTILINE)
        if match:
            versions.append(match.group(1))
    return max(versions, key=version_numbers, default="")


def check_platform(system: str, machine: str, uid: int) -> list[str]:
    """Linux on x86-64, as root."""
    faults = []
    if (system, machine) != ("Linux", "x86_64"):
        faults.append(f"platform: found {system} on {machine}, needed Linux on x86_64; use such a machine")
    if uid != 0:
        faults.append(
            f"user: found uid {uid}, needed root (nodes are privileged containers); run it with sudo -E"
        )
    return faults


def check_go(found: str | None, toolchain: str, wanted: str) -> list[str]:
    """Go is there and new enough, or can fetch a newer toolchain itself.

    `found` is the version of the installed go command (None: there is none), `toolchain` the value of
    GOTOOLCHAIN in force.
    """
    if found is None:
        return [
            f"Go: not found in PATH, needed {wanted} or newer; install it (any Go from 1.21 on will do with"
            " GOTOOLCHAIN=auto in the environment)"
        ]
    have = version_numbers(found)
    if have >= version_numbers(wanted):
        return []
    if have < FIRST_SWITCHING_GO:
        return [
            f"Go: found {found}, needed {wanted} or newer; install a newer Go (from 1.21 on GOTOOLCHAIN=auto"
            " lets it fetch the rest itself)"
        ]
    if toolchain.rsplit("+", maxsplit=1)[-1] in ("auto", "path"):
        return []
    return [
        f"Go: found {found} with GOTOOLCHAIN={toolchain}, needed {wanted} or newer; set GOTOOLCHAIN=auto"
        " in the environment so that it fetches the toolchain itself, or install a newer Go"
    ]


def check_disk(free_gib: float, needed_gib: float, where: str) -> list[str]:
    """Enough free space for what is still to be built, and never less than the lab's own minimum."""
    needed = max(needed_gib, MINIMUM_DISK_GIB)
    if free_gib >= needed:
        return []
    return [
        f"disk: found {free_gib:.1f} GiB free at {where}, needed {needed:.1f} GiB; free some, or point"
        " GPU_SLICES_CACHE at a larger file system"
    ]


def missing_packages(present: Mapping[str, bool], tools: Sequence[Tool] = TOOLS) -> list[str]:
    """Debian packages of the tools whose probe is not present, in the order of the table."""
    return [tool.package for tool in tools if not present[tool.probe]]


def check_packages(missing: Sequence[str], can_install: bool) -> list[str]:
    """Packages that are missing on a machine where they cannot be installed."""
    if not missing or can_install:
        return []
    return [
        f"programs: missing {', '.join(missing)} (Debian package names) and there is no apt-get here;"
        " install them with this system's own package manager"
    ]
