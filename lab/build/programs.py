"""The Go programs: one module a group, so that each gets the dependency versions of its own release.

A group's output holds `bin/<program>` and, where the release brings them, charts, CRDs and other files
copied out of its module, so that they are always of the same version as the program.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab.build.cache import copy_tree
from lab.build.process import BuildError, output, run
from lab.build.steps import Site, Step

KUBE_VERSION = "v1.36.3"
KUBE_STAMPS = {
    f"{package}.{name}": value
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for name, value in {
        "gitVersion": KUBE_VERSION,
        "gitMajor": "1",
        "gitMinor": "36",
        "gitTreeState": "clean",
        "buildDate": "2026-07-22T18:07:38Z",
    }.items()
}


@dataclass(frozen=True)
class Group:
    """Programs of one module under lab/.

    programs: program name -> main package. stamps: variable -> value, linked in.
    copies: name in the output -> path in the directory of `module`. mend: take the chart's dependencies out.
    """

    name: str
    programs: Mapping[str, str]
    module: str
    gib: float
    stamps: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    cgo: bool = False
    link: str = ""
    mend: bool = False


# A group's share of what all groups have in Go's caches.
SHARED_GIB = 0.55

DRIVER_COMMIT = "764900e7833798a1528bd52a2af3e1b2d5f7a616"

# What goes into images comes first, so that their import overlaps the compiling of the rest.
GROUPS = (
    Group(
        "runtime",
        {
            name: f"github.com/containerd/containerd/v2/cmd/{name}"
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        },
        "github.com/containerd/containerd/v2",
        0.5,
        stamps={"github.com/containerd/containerd/v2/version.Version": "v2.3.7"},
    ),
    Group("coredns", {"coredns": "."}, "github.com/coredns/coredns", 0.4),
    Group(
        "driver",
        {"gpu-kubelet-plugin": "sigs.k8s.io/dra-driver-nvidia-gpu/cmd/gpu-kubelet-plugin"},
        "sigs.k8s.io/dra-driver-nvidia-gpu",
        0.6,
        stamps={
            "sigs.k8s.io/dra-driver-nvidia-gpu/internal/info.version": "v0.4.1",
            "sigs.k8s.io/dra-driver-nvidia-gpu/internal/info.gitCommit": DRIVER_COMMIT,
        },
        copies={
            "chart": "deployments/helm/dra-driver-nvidia-gpu",
            "templates": "templates",
            "hack": "hack",
            "LICENSE": "LICENSE",
        },
        cgo=True,
        # The plugin opens the NVML library at run time; its symbols must stay unresolved until then.
        link="-Wl,-z,lazy",
    ),
    Group(
        "cdi-hook",
        {"nvidia-cdi-hook": "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook"},
        "github.com/NVIDIA/nvidia-container-toolkit",
        0.1,
        stamps={"github.com/NVIDIA/nvidia-container-toolkit/internal/info.version": "1.19.1"},
        cgo=True,
        link="-Wl,-z,lazy",
    ),
    Group(
        "jobset",
        {"jobset": "sigs.k8s.io/jobset"},
        "sigs.k8s.io/jobset",
        0.4,
        stamps={
            "sigs.k8s.io/jobset/pkg/version.GitVersion": "v0.12.0",
            "sigs.k8s.io/jobset/pkg/version.GitCommit": "09e9a3bb4b64dbe75b5b0119d3623903f0434643",
        },
        copies={"chart": "charts/jobset", "crds": "config/components/crd/bases"},
    ),
    Group(
        "trainer",
        {"trainer-controller-manager": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"},
        "github.com/kubeflow/trainer/v2",
        0.4,
        copies={"chart": "charts/kubeflow-trainer", "crds": "manifests/base/crds"},
        mend=True,
    ),
    Group(
        "kueue",
        {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
        "sigs.k8s.io/kueue",
        0.6,
        stamps={"sigs.k8s.io/kueue/pkg/version.GitVersion": "v0.17.0"},
        copies={"chart": "charts/kueue"},
    ),
    Group("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, "go.etcd.io/etcd/server/v3", 0.4),
    Group(
        "helm",
        {"helm": "helm.sh/helm/v3/cmd/helm"},
        "helm.sh/helm/v3",
        0.5,
        stamps={
            "helm.sh/helm/v3/internal/version.version": "v3.22.0",
            "helm.sh/helm/v3/internal/version.gitTreeState": "clean",
        },
    ),
    Group(
        "kube",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-proxy",
                "kube-scheduler",
                "kubectl",
                "kubelet",
            )
        },
        "k8s.io/kubernetes",
        3.0,
        stamps=KUBE_STAMPS,
    ),
)


def go_environment(cache: Path, *, cgo: bool = False) -> dict[str, str]:
    """The environment of the go command: its caches inside ours, and nothing of the user's flags."""
    return {
        **os.environ,
        "GOCACHE": str(cache / "go" / "build"),
        "GOMODCACHE": str(cache / "go" / "mod"),
        "GOFLAGS": "-mod=readonly -modcacherw -trimpath -buildvcs=false",
        "GOWORK": "off",
        "GOOS": "linux",
        "GOARCH": "amd64",
        "GOAMD64": "v1",
        "CGO_ENABLED": "1" if cgo else "0",
    }


def without_dependencies(chart: str) -> str:
    """Chart.yaml without its `dependencies:` block.

    Helm refuses a chart whose dependencies are not in charts/, even those that are switched off.
    Raises ValueError when there is no such block, since then the release is not the one this was made for.
    """
    lines = chart.splitlines(keepends=True)
    if "dependencies:\n" not in lines:
        raise ValueError("Chart.yaml has no dependencies block")
    start = lines.index("dependencies:\n")
    end = start + 1
    while end < len(lines) and not re.match(r"[^\s-]", lines[end]):
        end += 1
    return "".join(lines[:start] + lines[end:])


def build_group(group: Group, site: Site) -> None:
    """Compile a group's programs and copy its files."""
    module = site.repo / "lab" / group.name
    env = go_environment(site.cache.root, cgo=group.cgo)
    flags = ["-s", "-w", *(f"-X {name}={value}" for name, value in group.stamps.items())]
    if group.link:
        flags.append(f"-extldflags={group.link}")
    site.say(f"compiling {len(group.programs)} programs" if len(group.programs) > 1 else "compiling")
    # One call for all of a group: they share most packages, and links run side by side.
    target = site.out / "bin"
    target.mkdir()
    single = next(iter(group.programs)) if len(group.programs) == 1 else ""
    argv = ["go", "build", "-ldflags", " ".join(flags), "-o", f"{target}/{single}", *group.programs.values()]
    run(argv, site.log, cwd=module, env=env)
    made = {path.name for path in target.iterdir()}
    if made != set(group.programs):
        raise BuildError(f"{group.name}: found {sorted(made)}, needed {sorted(group.programs)}")
    if group.copies:
        source = Path(output(["go", "list", "-m", "-f", "{{.Dir}}", group.module], cwd=module, env=env))
        for name, inside in group.copies.items():
            if (source / inside).is_dir():
                copy_tree(source / inside, site.out / name)
            else:
                shutil.copyfile(source / inside, site.out / name)
    if group.mend:
        chart = site.out / "chart" / "Chart.yaml"
        chart.write_text(without_dependencies(chart.read_text()))


def group_steps(repo: Path, go_version: str) -> list[Step]:
    """One step a group."""

    def step(group: Group) -> Step:
        module = repo / "lab" / group.name
        return Step(
            kind="go",
            name=group.name,
            lane="compile",
            build=lambda site: build_group(group, site),
            gib=group.gib + SHARED_GIB,
            files=(module / "go.mod", module / "go.sum", *sorted(module.glob("*.go"))),
            values=(go_version, repr(group)),
            recipe=(build_group, go_environment, copy_tree, *((without_dependencies,) if group.mend else ())),
            keep=2,  # a running lab may still have the last one's programs mounted
        )

    return [step(group) for group in GROUPS]
