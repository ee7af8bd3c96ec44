"""Root file systems made of Debian packages: for the nodes, for training, and a static shell.

mmdebstrap rather than debootstrap: apt fetches the packages over few connections instead of one at a time,
and the result comes as a tar whose entries are sorted and whose times are clamped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.build.cache import remove
from lab.build.process import NAMESPACES, BuildError, run
from lab.build.steps import Site, Step

SUITE = "bookworm"
# Later than any file of the suite's packages would only make the archive depend on the clock.
SOURCE_DATE_EPOCH = "1767225600"  # 2026-01-01

NODE_PACKAGES = (
    "ca-certificates",
    "conntrack",
    "containernetworking-plugins",
    "ethtool",
    "iproute2",
    "iptables",
    "kmod",
    "mount",
    "procps",
    "psmisc",
    "python3",
    "python3-yaml",
    "runc",
    "runit",
    "util-linux",
)
TRAIN_PACKAGES = (
    "libopenblas0-pthread",
    "python3",
    "python3-filelock",
    "python3-fsspec",
    "python3-jinja2",
    "python3-numpy",
    "python3-packaging",
    "python3-psutil",
    "python3-requests",
    "python3-torch",
    "python3-tqdm",
    "python3-typing-extensions",
    "python3-yaml",
)
SHELL_PACKAGES = ("bash-static", "busybox-static")

NODE_IMAGE = "localhost/gpu-slices-node"

PODMAN = ("podman", "--cgroup-manager=cgroupfs", "--runtime=runc", "--events-backend=file")

# Nobody reads manuals or needs translations in there; licences stay.
EXCLUDED = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/include/*",
    "path-exclude=/usr/lib/libtorch-test/*",
    "path-exclude=/usr/lib/python3/dist-packages/torch/test/*",
)


def mmdebstrap(
    site: Site, target: Path, variant: str, packages: Sequence[str], extra: Sequence[str] = (), **env: str
) -> None:
    """Make a root file system tar of `packages`. `extra` are more options, `env` what their hooks read."""
    work = site.out / "work"
    work.mkdir()
    argv = [
        *NAMESPACES,
        "mmdebstrap",
        "--mode=root",
        f"--variant={variant}",
        "--architectures=amd64",
        "--format=tar",
        "--skip=output/dev",
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt={rule}" for rule in EXCLUDED),
        '--aptopt=Acquire::Retries "3"',
        '--aptopt=Acquire::Languages "none"',
        f"--include={','.join(packages)}",
        *extra,
        SUITE,
        str(target),
    ]
    # The umask and the variables below would show in the result.
    settings = {"TMPDIR": str(work), "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, "LC_ALL": "C.UTF-8", **env}
    dropped = ("TMP", "TEMP", "LANGUAGE", "PYTHONPATH", "PYTHONHOME")
    run(argv, site.log, env={**{k: v for k, v in os.environ.items() if k not in dropped}, **settings})
    remove(work)


def build_node_rootfs(site: Site) -> None:
    """The nodes' root file system."""
    site.say(f"fetching and installing {len(NODE_PACKAGES)} Debian packages with what they need")
    # runit's own services would only be in the way: the lab runs runsvdir over its own directory.
    hook = '--customize-hook=rm -rf "$1"/etc/runit/runsvdir/default/* "$1"/etc/hostname "$1"/etc/resolv.conf'
    mmdebstrap(site, site.out / "rootfs.tar", "minbase", NODE_PACKAGES, (hook,))


def build_node_image(site: Site) -> None:
    """Import the nodes' root file system into Podman."""
    reference = node_reference(site.out)
    site.say(f"importing {reference} into Podman")
    run([*PODMAN, "import", "--quiet", str(site.needs["node-rootfs"] / "rootfs.tar"), reference], site.log)
    (site.out / "reference").write_text(f"{reference}\n")


def node_reference(place: Path) -> str:
    """The image reference that belongs to an output directory of the node image, finished or partial."""
    return f"{NODE_IMAGE}:{place.name.rpartition('-')[2]}"


def node_image_present(place: Path) -> bool:
    """Whether the image was imported and Podman still has it."""
    if not (place / "reference").is_file():
        return False
    if shutil.which("podman") is None:
        return False
    argv = [*PODMAN, "image", "exists", node_reference(place)]
    return subprocess.run(argv, check=False, stderr=subprocess.DEVNULL).returncode == 0


def build_shell(site: Site) -> None:
    """A static bash and busybox, unpacked."""
    site.say(f"fetching {', '.join(SHELL_PACKAGES)}")
    tar = site.out / "shell.tar"
    mmdebstrap(site, tar, "extract", SHELL_PACKAGES)
    for member in ("./bin/bash-static", "./bin/busybox"):
        run(["tar", "--extract", "--file", str(tar), "--directory", str(site.out), member], site.log)
    tar.unlink()


def install_wheels(site: Site, requirements: Path, target: Path) -> None:
    """Install the pinned wheels for the suite's Python 3.11, whatever Python runs this."""
    pip = [sys.executable, "-m", "pip"]
    environment = site.out / "pip"
    if subprocess.run([*pip, "--version"], check=False, capture_output=True).returncode:
        run([sys.executable, "-m", "venv", str(environment)], site.log)
        pip = [str(environment / "bin" / "python"), "-m", "pip"]
    platforms = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
    run(
        [
            *pip,
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
            "--implementation=cp",
            "--python-version=3.11",
            *(f"--platform={name}" for name in platforms),
            "--no-compile",
            f"--target={target}",
            f"--requirement={requirements}",
        ],
        site.log,
    )
    remove(environment)
    remove(target / "bin")


def build_train_rootfs(site: Site) -> None:
    """The training image's root file system: Debian's torch and OpenBLAS, the rest as wheels."""
    files = site.repo / "lab" / "images" / "train"
    wheels = site.out / "wheels"
    site.say("fetching the Python wheels")
    install_wheels(site, files / "requirements.txt", wheels)
    if not any(wheels.iterdir()):
        raise BuildError("pip installed nothing")
    site.say(f"fetching and installing {len(TRAIN_PACKAGES)} Debian packages with what they need")
    hook = f'--customize-hook=sh "{files}/customize" "$1"'
    mmdebstrap(site, site.out / "rootfs.tar", "minbase", TRAIN_PACKAGES, (hook,), WHEELS=str(wheels))
    remove(wheels)


def debian_steps(repo: Path) -> list[Step]:
    """The root file systems and the nodes' image."""
    files = repo / "lab" / "images" / "train"
    common = (SUITE, SOURCE_DATE_EPOCH, *EXCLUDED)
    return [
        Step(
            kind="rootfs",
            name="node-rootfs",
            lane="debian",
            build=build_node_rootfs,
            gib=0.4,
            values=(*common, *NODE_PACKAGES),
            recipe=(mmdebstrap,),
        ),
        Step(
            kind="image",
            name="node-image",
            lane="image",
            build=build_node_image,
            gib=0.4,
            needs=("node-rootfs",),
            values=(NODE_IMAGE,),
            present=node_image_present,
        ),
        Step(
            kind="rootfs",
            name="shell",
            lane="debian",
            build=build_shell,
            gib=0.1,
            values=(*common, *SHELL_PACKAGES),
            recipe=(mmdebstrap,),
        ),
        Step(
            kind="rootfs",
            name="train-rootfs",
            lane="debian",
            build=build_train_rootfs,
            gib=1.6,
            files=(files / "requirements.txt", files / "customize"),
            values=(*common, *TRAIN_PACKAGES),
            recipe=(mmdebstrap, install_wheels),
        ),
    ]
