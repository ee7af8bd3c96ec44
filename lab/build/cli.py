"""The builder's command line: check the machine, build what is missing, say where things lie."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.build import checks
from lab.build.cache import Cache, cache_root, remove
from lab.build.debian import NODE_IMAGE, PODMAN, debian_steps, node_reference
from lab.build.images import ARCHIVE, REFERENCES, image_name, image_steps
from lab.build.process import CHILDREN, BuildError, output, run
from lab.build.programs import GROUPS, group_steps
from lab.build.recipe import recipe_steps
from lab.build.seed import ROOT, seed_step, written_files
from lab.build.silicon import FILES, silicon_step
from lab.build.steps import Plan

REPO = Path(__file__).resolve().parents[2]

# Groups whose programs run in images only.
IN_IMAGES = ("coredns", "driver", "cdi-hook", "jobset", "trainer", "kueue")
CHARTS = {
    "jobset": "jobset",
    "kubeflow-trainer": "trainer",
    "kueue": "kueue",
    "dra-driver-nvidia-gpu": "driver",
}
CRDS = {"jobset": "jobset", "trainer": "trainer"}


class Refusal(Exception):
    """This machine cannot build the lab; the text lists every reason."""


def wanted_go() -> str:
    """The Go that the groups ask for."""
    return checks.wanted_go(REPO / "lab" / group.name / "go.mod" for group in GROUPS)


def go_version(wanted: str) -> tuple[str, list[str]]:
    """The Go that will compile ("" when there is none), and what is wrong with it."""
    if shutil.which("go") is None:
        return "", checks.check_go(None, "", wanted)
    # Outside any module the installed command answers for itself, whatever a go.mod asks for.
    found, _, toolchain = output(["go", "env", "GOVERSION", "GOTOOLCHAIN"], cwd=Path("/")).partition("\n")
    faults = checks.check_go(found, toolchain, wanted)
    fetches = not faults and checks.version_numbers(found) < checks.version_numbers(wanted)
    return f"go{wanted}" if fetches else found, faults


def make_plan(cache: Cache, go: str) -> Plan:
    """All steps, each after what it needs."""
    steps = [
        *group_steps(REPO, go),
        *debian_steps(REPO),
        silicon_step(REPO),
        *recipe_steps(REPO),
        *image_steps(REPO),
        seed_step(REPO),
    ]
    return Plan(steps, REPO, cache)


def manifest(plan: Plan) -> dict[str, Any]:
    """Where everything built lies; what is not built yet is left out and named under "missing"."""
    built = {name: plan.paths[name] for name in plan.steps if plan.is_built(name)}
    silicon = built.get("silicon")
    node = built.get("node-image")
    seed = built["containerd"] / ROOT if "containerd" in built else None
    return {
        "bin": {
            program: str(built[group.name] / "bin" / program)
            for group in GROUPS
            if group.name not in IN_IMAGES and group.name in built
            for program in group.programs
        },
        "charts": {chart: str(built[group] / "chart") for chart, group in CHARTS.items() if group in built},
        "crds": {name: str(built[group] / "crds") for name, group in CRDS.items() if group in built},
        "node_rootfs": str(built["node-rootfs"] / "rootfs.tar") if "node-rootfs" in built else None,
        "node_image": node_reference(node) if node else None,
        "images": {
            name: {"ref": reference, "tar": str(built[image_name(name)] / ARCHIVE)}
            for name, reference in REFERENCES.items()
            if image_name(name) in built
        },
        "containerd_seed": str(seed) if seed else None,
        "containerd_seed_copy": written_files(seed) if seed else [],
        "silicon": {name: str(silicon / file) for name, file in FILES.items()} if silicon else {},
        "missing": sorted(set(plan.steps) - set(built)),
    }


def probe(tool: checks.Tool) -> bool:
    """Whether a tool is there."""
    if tool.probe == "pip":
        return any(importlib.util.find_spec(module) for module in ("pip", "ensurepip"))
    if tool.probe.startswith("/"):
        return Path(tool.probe).exists()
    # Not everybody who is root has these in PATH.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return shutil.which(tool.probe, path=path) is not None


def check_machine(plan: Plan, missing: Sequence[str], go_faults: Sequence[str], cache: Cache) -> list[str]:
    """Raise Refusal with every fault of this machine; returns the Debian packages to be installed.

    Where nothing is missing, only what the lab itself cannot do without counts.
    """
    faults = checks.check_platform(platform.system(), platform.machine(), os.geteuid())
    packages: list[str] = []
    if missing:
        place = cache.root
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free / 2**30
        needed = sum(plan.steps[name].gib for name in missing)
        tools = (*checks.TOOLS, checks.PIP)
        packages = checks.missing_packages({tool.probe: probe(tool) for tool in tools}, tools)
        faults += go_faults
        faults += checks.check_disk(free, needed, str(place))
        faults += checks.check_packages(packages, shutil.which("apt-get") is not None)
    if faults:
        raise Refusal("\n".join(f"- {fault}" for fault in faults))
    return packages


def install_packages(packages: Sequence[str], cache: Cache) -> None:
    """Install Debian packages, nothing recommended with them, no questions asked."""
    cache.logs.mkdir(parents=True, exist_ok=True)
    log = cache.logs / "packages.log"
    log.write_bytes(b"")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], log, env=env)
    run(["apt-get", "install", "--yes", "--no-install-recommends", *packages], log, env=env)


def drop_node_images(current: str) -> None:
    """Remove older node images that no container uses."""
    listed = output([*PODMAN, "image", "ls", "--noheading", "--format={{.Repository}}:{{.Tag}}", NODE_IMAGE])
    for reference in listed.splitlines():
        if reference != current:
            subprocess.run([*PODMAN, "image", "rm", reference], check=False, capture_output=True)


def examine(targets: Sequence[str], cache: Cache) -> tuple[Plan, list[str], list[str]]:
    """The plan, the steps missing for the targets (none: all), and the Debian packages to install first.

    Raises Refusal when this machine cannot build them.
    """
    go, go_faults = go_version(wanted_go())
    plan = make_plan(cache, go)
    unknown = sorted(set(targets) - set(plan.steps))
    if unknown:
        raise Refusal(f"no such target: {', '.join(unknown)}; there are {', '.join(plan.steps)}")
    missing = plan.missing(targets or list(plan.steps))
    return plan, missing, check_machine(plan, missing, go_faults, cache)


def build(targets: Sequence[str], cache: Cache, started: float) -> None:
    """Build the targets (none: everything) and what they need."""

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    plan, missing, packages = examine(targets, cache)
    if not missing:
        say("lab: everything is built")
        return
    if packages:
        say(f"packages: installing {', '.join(packages)}")
        install_packages(packages, cache)
    cache.sweep((step.kind, step.name) for step in plan.steps.values())
    say(f"lab: building {len(missing)} of {len(plan.steps)} parts: {', '.join(missing)}")
    plan.run(missing, say)
    if "node-image" in missing:
        drop_node_images(node_reference(plan.paths["node-image"]))
    say("lab: done")


def clean(cache: Cache) -> None:
    """Remove everything that the builder made: its part of the cache and its images in Podman."""
    for part in (cache.build, cache.root / "go", cache.logs):
        remove(part)
    if shutil.which("podman"):
        drop_node_images("")


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Entry point; returns the exit status."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="lab/build", description="Build what the lab is made of, once.")
    parser.add_argument("targets", nargs="*", help="parts to build, with what they need (default: all)")
    parser.add_argument(
        "--manifest", action="store_true", help="print where everything lies, as JSON, and end"
    )
    parser.add_argument(
        "--check", action="store_true", help="check the machine only: status 2 and the faults, or 0"
    )
    parser.add_argument("--clean", action="store_true", help="remove everything that was built, and end")
    options = parser.parse_args(argv)
    cache = Cache(cache_root(environ))
    try:
        if options.clean:
            clean(cache)
        elif options.check:
            examine(options.targets, cache)
        elif options.manifest:
            print(json.dumps(manifest(make_plan(cache, go_version(wanted_go())[0])), indent=2))
        else:
            build(options.targets, cache, started)
    except Refusal as refusal:
        print(f"The lab cannot be built here. Nothing was changed.\n{refusal}", file=sys.stderr)
        return 2
    except BuildError as error:
        print(f"The build failed: {error}\nWhole logs: {cache.logs}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):
            CHILDREN.stop()
        print("Interrupted; what was complete is kept.", file=sys.stderr)
        return 130
    return 0
