"""A containerd root directory with every image imported and unpacked, made once and copied to each node.

On one file system a copy takes no space and no time: the SHARED trees are hard-linked, the rest is copied.
"""

from __future__ import annotations

import os
from pathlib import Path

from lab.build.cache import remove
from lab.build.images import ARCHIVE, REFERENCES, image_name
from lab.build.process import NAMESPACES, run
from lab.build.steps import Site, Step

ROOT = "root"

# Trees of which nothing is ever written again once it is there.
SHARED = ("io.containerd.content.v1.content/blobs", "io.containerd.snapshotter.v1.overlayfs/snapshots")


def build_seed(site: Site) -> None:
    """Run the built containerd in namespaces of its own and let it import all images."""
    site.say(f"importing and unpacking {len(REFERENCES)} images")
    # In this order: an archive may leave out layers that an earlier one brings.
    archives = [str(site.needs[image_name(name)] / ARCHIVE) for name in REFERENCES]
    loader = site.repo / "lab" / "images" / "load"
    programs = site.needs["runtime"] / "bin"
    # --net: the CRI plugin looks at interfaces; it is to see only a loopback of its own.
    run(
        [
            *NAMESPACES,
            "--net",
            "sh",
            str(loader),
            str(programs),
            str(site.out / ROOT),
            REFERENCES["pause"],
            *archives,
        ],
        site.log,
    )
    # Each node's containerd is to find an identity of its own.
    remove(site.out / ROOT / "io.containerd.grpc.v1.introspection" / "uuid")


def seed_step(repo: Path) -> Step:
    """The seed of the nodes' containerd."""
    return Step(
        kind="seed",
        name="containerd",
        lane="image",
        build=build_seed,
        gib=4.7,
        needs=("runtime", *(image_name(name) for name in sorted(REFERENCES))),
        files=(repo / "lab" / "images" / "load",),
        values=(*NAMESPACES, *(f"{name}={reference}" for name, reference in sorted(REFERENCES.items()))),
    )


def written_files(root: Path) -> list[str]:
    """The files below a containerd root that lie outside the shared trees, relative to it.

    containerd writes its databases in place, so a copy that shares its images must have its own of these.
    """
    shared = {root / path for path in SHARED}
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if Path(directory) / name not in shared]
        found += [str((Path(directory) / name).relative_to(root)) for name in files]
    return sorted(found)
