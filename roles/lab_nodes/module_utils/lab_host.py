"""What this machine is and allows, as far as lab nodes care, and the small pieces of Podman handling.

Controller only (Python 3.11+), stdlib only. These functions read and act; lab_plan decides what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Iterator, Sequence

from ansible.module_utils.lab_plan import LABEL_INSTANCE, SNAPSHOTS, Limits, limits, overlaps, routes

CAP_SYS_RESOURCE = 24
MIN_FREE_BYTES = 8 * 1000**3
# Measured: three nodes with operators and driver hold 1.7 GB, jobs come on top.
MIN_MEMORY_BYTES = 3 * 1000**3
# Kubelet, containerd and kube-proxy watch files; measured: 35 for three nodes, without the driver.
INOTIFY_INSTANCES = 50
CGROUP = Path("/sys/fs/cgroup")
V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids")
V2_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
# File systems that overlayfs cannot write to, or that lose the images.
BAD_FILE_SYSTEMS = ("overlay", "aufs", "nfs", "nfs4", "fuse", "9p", "vfat", "tmpfs", "ramfs")


class HostError(Exception):
    """A command that had to work did not; the text holds the command and its last words."""


def run(command: Sequence[str], timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command, collecting its output. Raises HostError when it fails (with `check`) or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise HostError(f"{' '.join(command[:3])} did not end within {timeout:.0f} s") from error
    except FileNotFoundError as error:
        raise HostError(f"{command[0]} is not installed") from error
    if check and done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise HostError(
            f"{' '.join(command[:3])} failed ({done.returncode}): {' / '.join(words) or 'no output'}"
        )
    return done


@contextlib.contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Keep a second run on the same lab waiting until this one is through; a killed one lets go by itself."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (run_dir.parent / f".{run_dir.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def podman_json(*arguments: str) -> Any:
    """Output of a Podman command that prints JSON; [] when it prints nothing."""
    return json.loads(run(["podman", *arguments]).stdout or "[]")


def containers(instance: str) -> list[dict[str, Any]]:
    """`podman inspect` of every container of the lab, running or not."""
    ids = run(
        ["podman", "ps", "--all", "--quiet", "--filter", f"label={LABEL_INSTANCE}={instance}"]
    ).stdout.split()
    if not ids:
        return []
    # One may be going away meanwhile; inspect prints the others all the same.
    found: list[dict[str, Any]] = json.loads(run(["podman", "inspect", *ids], check=False).stdout or "[]")
    return found


def network(name: str) -> dict[str, Any] | None:
    """`podman network inspect`, None when there is no such network."""
    done = run(["podman", "network", "inspect", name], check=False)
    if done.returncode != 0:
        return None
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found[0] if found else None


def podman_package() -> bool:
    """Whether Debian's package of Podman can be installed (the builder does that)."""
    try:
        found = run(["apt-cache", "policy", "podman"]).stdout
    except HostError:
        return False
    return "Candidate:" in found and "Candidate: (none)" not in found


def living_pids() -> set[int]:
    """Processes that exist and are more than zombies."""
    living = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                living.add(int(entry.name))
    return living


def may_raise_limits() -> bool:
    """Whether root here still has CAP_SYS_RESOURCE (sandboxes often take it away)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)
    return False


def host_limits() -> Limits:
    """Limits for the containers. See lab_plan.limits."""
    return limits(
        hard_nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        hard_nproc=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        can_raise=may_raise_limits(),
    )


def bridge_firewall() -> bool:
    """Whether the host's iptables look at frames between two containers on one bridge (br_netfilter)."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text().strip() == "1"
    return False


def inotify_left() -> int:
    """How many more inotify instances root may open; the limit holds for all containers together."""
    used = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            used += os.readlink(link) == "anon_inode:inotify"
    return int(Path("/proc/sys/fs/inotify/max_user_instances").read_text()) - used


def available_memory() -> int:
    """Bytes that programs may still take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def cgroup_mounts() -> dict[str, str]:
    """Mount point -> `cgroup` or `cgroup2`."""
    mounts = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, target, kind = line.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            mounts[target] = kind
    return mounts


def cgroup_version() -> int:
    """2 when /sys/fs/cgroup itself is the unified hierarchy, else 1 (also for hybrid set-ups)."""
    return 2 if cgroup_mounts().get(str(CGROUP)) == "cgroup2" else 1


def file_system(path: Path) -> str:
    """Type of the file system that holds `path` (or its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    found, best = "unknown", -1
    target = str(path.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind = line.split()[:3]
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        # The last of several mounts on one point is the one that shows.
        if inside and len(mount) >= best:
            found, best = kind, len(mount)
    return found


def findings(cache: Path, subnet: str, network_name: str, need_room: bool) -> list[str]:
    """Every reason why this machine cannot host the lab, each with what was found and what to do; [] = go."""
    faults = []
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        faults.append(
            f"found {platform.system()} on {platform.machine()}; needed Linux on x86-64: "
            "run the lab on such a machine"
        )
        return faults
    if os.geteuid() != 0:
        faults.append(f"found user id {os.geteuid()}; needed root: run it with sudo or as root")
    podman = shutil.which("podman") is not None
    if not podman and not podman_package():
        faults.append(
            "found no podman in PATH and no such package; needed Podman 4 or newer: "
            "on Debian 12 or newer, apt-get update && apt-get install podman"
        )
    if os.geteuid() != 0:
        return faults
    faults += _cgroup_findings()
    known = network(network_name) if podman else None
    taken = {
        route: f"route through {interface}"
        for route, interface in routes(Path("/proc/net/route").read_text()).items()
        if not known or interface != known.get("network_interface")
    }
    for other in podman_json("network", "ls", "--format", "json") if podman else []:
        if other.get("name") != network_name:
            taken.update({s["subnet"]: f"Podman network {other['name']}" for s in other.get("subnets") or []})
    for clash in overlaps(subnet, taken):
        faults.append(
            f"found {clash} using addresses of {subnet}; needed a free subnet: "
            "free it or set GPU_SLICES_LAB_SUBNET to another /24"
        )
    if (
        known
        and not any(s.get("subnet") == subnet for s in known.get("subnets") or [])
        and containers_on(network_name)
    ):
        faults.append(
            f"found a Podman network {network_name} with another subnet in use; needed {subnet}: "
            "run make lab-down first"
        )
    kind = file_system(cache)
    if kind in BAD_FILE_SYSTEMS:
        faults.append(
            f"found {cache} on {kind}; needed a local file system (ext4, xfs, btrfs): "
            "set GPU_SLICES_CACHE to a folder on one"
        )
    if need_room:
        watchers = inotify_left()
        if watchers < INOTIFY_INSTANCES:
            faults.append(
                f"found {watchers} inotify instances left for root; needed {INOTIFY_INSTANCES}: "
                "sysctl -w fs.inotify.max_user_instances=512"
            )
        memory = available_memory()
        if memory < MIN_MEMORY_BYTES:
            faults.append(
                f"found {memory / 1000**3:.1f} GB of memory available; needed 3 GB: "
                "end what else runs here, or use a larger machine"
            )
        free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
        if free < MIN_FREE_BYTES:
            faults.append(
                f"found {free / 1000**3:.1f} GB free for {cache}; needed 8 GB: "
                "free some or set GPU_SLICES_CACHE to a folder on a larger disk"
            )
    return faults


def _cgroup_findings() -> list[str]:
    if cgroup_version() == 2:
        present = set((CGROUP / "cgroup.controllers").read_text().split())
        missing = [name for name in V2_CONTROLLERS if name not in present]
        where = "cgroup v2"
    else:
        mounted = {Path(target).name for target in cgroup_mounts()}
        names = {part for name in mounted for part in name.split(",")}
        missing = [name for name in V1_CONTROLLERS if name not in names]
        where = "cgroup v1"
    if missing:
        return [
            f"found {where} without {', '.join(missing)}; needed by the kubelet: enable these controllers"
        ]
    return []


def containers_on(network_name: str) -> list[str]:
    """Names of the containers attached to a Podman network."""
    done = run(
        ["podman", "ps", "--all", "--filter", f"network={network_name}", "--format", "{{.Names}}"],
        check=False,
    )
    return done.stdout.split()


def cgroup_dirs(cgroup_path: str) -> Iterator[Path]:
    """Directories of one cgroup in every hierarchy, and those of its monitor process."""
    relative = cgroup_path.lstrip("/")
    parent, _, leaf = relative.rpartition("/")
    for target in cgroup_mounts():
        for name in (leaf, leaf.replace("libpod-", "libpod-conmon-", 1), f"{leaf}-conmon"):
            directory = Path(target) / parent / name
            if name and directory.is_dir():
                yield directory


def kill_cgroup(cgroup_path: str) -> int:
    """Kill every process in the container's cgroups; returns how many were there."""
    pids = set()
    for directory in cgroup_dirs(cgroup_path):
        for procs in directory.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                pids |= {int(pid) for pid in procs.read_text().split()}
    pids.discard(0)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def remove_cgroup(cgroup_path: str, patience: float = 5) -> list[str]:
    """Remove the container's empty cgroups, deepest first; returns what is left after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        left = []
        for directory in cgroup_dirs(cgroup_path):
            for path in sorted((directory, *(p for p in directory.rglob("*") if p.is_dir())), reverse=True):
                try:
                    path.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    left.append(str(path))
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    # The parent is Podman's own, made with its first container; it goes with the last.
    if cgroup_path.startswith("/libpod_parent/"):
        for target in cgroup_mounts():
            with contextlib.suppress(OSError):
                (Path(target) / "libpod_parent/conmon").rmdir()
            with contextlib.suppress(OSError):
                (Path(target) / "libpod_parent").rmdir()
    return left


def sweep_cgroups() -> None:
    """Remove the empty cgroups of containers that no longer exist: a Podman that was killed leaves them."""
    orphans = {
        path.name: f"/libpod_parent/{path.name}"
        for target in cgroup_mounts()
        for path in (Path(target) / "libpod_parent").glob("libpod-*")
    }
    # Asked after the look: a container that has come since is not among them.
    known = set(run(["podman", "ps", "--all", "--quiet", "--no-trunc"]).stdout.split())
    for name, cgroup_path in orphans.items():
        if name.rpartition("-")[2] not in known:
            remove_cgroup(cgroup_path, patience=0)


def remove_container(name: str, cgroup_path: str) -> None:
    """Remove a container whatever state it is in. Raises HostError when it stays."""
    reason = ""
    for attempt in range(3):
        try:
            done = run(["podman", "rm", "--force", "--time=0", "--volumes", name], timeout=40, check=False)
            reason = done.stderr.strip()
        except HostError as error:
            reason = str(error)
        if run(["podman", "container", "exists", name], check=False).returncode != 0:
            break
        # Podman waits for a monitor that is dead, or for a process that cannot be reached through it.
        if cgroup_path:
            kill_cgroup(cgroup_path)
        time.sleep(0.3 * (attempt + 1))
    else:
        raise HostError(f"container {name} cannot be removed: {reason}")
    # What a killed `podman run` leaves in the storage without a container.
    if "storage" in reason:
        run(["podman", "rm", "--force", "--storage", name], check=False)
    if cgroup_path:
        kill_cgroup(cgroup_path)
        remove_cgroup(cgroup_path)


def remove_tree(path: Path) -> None:
    """Remove a folder that may hold hundreds of thousands of hard links."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        run(["rm", "-rf", "--one-file-system", str(path)], timeout=300)


def snapshot_names(seed: Path) -> tuple[str, ...]:
    """The unpacked image layers in a containerd root."""
    folder = seed / SNAPSHOTS
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def plant_seed(seed: Path, target: Path, copies: Sequence[str]) -> None:
    """Make `target` a containerd root with all the seed's images, at once or not at all.

    Layers, tens of thousands of files, are left empty: they get mounted over, read-only. Blobs are linked
    (across file systems: copied); the files in `copies` get written in place and are copied.
    """

    def link(source: str, copy: str) -> None:
        if str(Path(source).relative_to(seed)) in copies:
            shutil.copy2(source, copy)
            return
        try:
            os.link(source, copy)
        except OSError:
            shutil.copy2(source, copy)

    scratch = target.with_name(target.name + ".part")
    remove_tree(scratch)
    layers = seed / SNAPSHOTS

    def inside_layers(folder: str, names: list[str]) -> list[str]:
        return names if Path(folder).parent == layers else []

    shutil.copytree(seed, scratch, symlinks=True, ignore=inside_layers, copy_function=link)
    remove_tree(target)
    scratch.rename(target)
