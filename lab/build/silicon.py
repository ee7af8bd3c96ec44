"""The emulated silicon: the NVML library, nvidia-smi on top of it and the tool that sets cards up."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lab.build.process import run
from lab.build.steps import Site, Step

SOURCES = ("silicon", "nvml", "nvidia_smi")
# Name in the manifest -> file in the output; the library's real name carries the driver's version.
FILES = {
    "dir": "",
    "libnvidia_ml": "libnvidia-ml.so.1",
    "nvidia_smi": "nvidia-smi",
    "lab_silicon": "lab-silicon",
}


def build_silicon(site: Site) -> None:
    """Compile the emulated silicon."""
    site.say("compiling")
    # Nothing of the caller's: `make lab` hands down variables of make itself, and CFLAGS would count.
    env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    run(["make", "-C", str(site.repo / "lab" / "silicon"), f"OUT={site.out}"], site.log, env=env)


def silicon_step(repo: Path) -> Step:
    """The step; its sources are C files, headers, the makefile and the export map."""
    sources = [
        file
        for directory in SOURCES
        for file in sorted((repo / "lab" / directory).iterdir())
        if re.search(r"\.(c|h|map)$|^Makefile$", file.name)
    ]
    return Step(
        kind="silicon",
        name="silicon",
        lane="image",
        build=build_silicon,
        gib=0.01,
        files=tuple(sources),
        keep=2,
    )
