"""The recipe's layers above the training image: LlamaFactory; a base model and a data set."""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.build.cache import remove
from lab.build.debian import install_wheels
from lab.build.oci import Entry, write_layer
from lab.build.process import NAMESPACES, BuildError, run
from lab.build.steps import Site, Step

LAYER = "layer.tar"

# Where things lie in the image.
HOME = "opt/llamafactory"
SHARE = "opt/lab"

PATH = "/usr/local/bin:/usr/bin:/bin"

# Debian's torch 1.13 under Python 3.11, whose dataclasses refuse a mutable default.
TORCH_FILE = "usr/lib/python3/dist-packages/torch/distributed/_shard/sharded_tensor/metadata.py"
TORCH_FAULT = "field(default=TensorProperties())"
TORCH_REMEDY = "field(default_factory=TensorProperties)"


def unpack(site: Site) -> Path:
    """The training image's root file system, to work in and to be removed again."""
    root = site.out / "work"
    root.mkdir()
    archive = site.needs["train-rootfs"] / "rootfs.tar"
    run(["tar", "--extract", "--file", str(archive), "--directory", str(root)], site.log)
    return root


def inside(site: Site, root: Path, *argv: str) -> None:
    """Run a program (after any VARIABLE=value) in a root file system, without a network."""
    script = site.repo / "lab" / "images" / "recipe" / "inside"
    run([*NAMESPACES, "--net", "sh", str(script), str(root), "HOME=/tmp", f"PATH={PATH}", *argv], site.log)


def tree(source: Path, target: str) -> list[Entry]:
    """Layer entries for a directory's files and links, readable by everybody whatever wrote them."""
    entries = []
    for path in sorted(source.rglob("*")):
        name = f"{target}/{path.relative_to(source)}"
        if path.is_symlink():
            entries.append(Entry(name, link=str(path.readlink())))
        elif path.is_file():
            entries.append(Entry(name, path, mode=0o755 if path.stat().st_mode & 0o100 else 0o644))
    return entries


def mend(file: Path, fault: str, remedy: str) -> None:
    """Replace a piece of a file; BuildError when it is not there exactly once."""
    text = file.read_text()
    if text.count(fault) != 1:
        raise BuildError(f"{file.name} has `{fault}` {text.count(fault)} times, needed once")
    file.write_text(text.replace(fault, remedy))


def drop_tests(packages: Path) -> None:
    """Remove the test suites that some wheels bring along."""
    for name in ("matplotlib", "pandas", "pyarrow", "scipy"):
        for path in [*(packages / name).rglob("tests")]:
            remove(path)


def build_llamafactory(site: Site) -> None:
    """LlamaFactory in a directory of its own, with its own versions of what the training image also has."""
    files = site.repo / "lab" / "images" / "recipe"
    site.say("fetching the Python wheels")
    root = unpack(site)
    packages = root / HOME / "lib"
    packages.mkdir(parents=True)
    install_wheels(site, files / "requirements.txt", packages)
    drop_tests(packages)
    mend(root / TORCH_FILE, TORCH_FAULT, TORCH_REMEDY)
    command = root / HOME / "bin" / "llamafactory-cli"
    command.parent.mkdir()
    shutil.copy(files / "llamafactory-cli", command)
    site.say("compiling and trying it")
    # The layer's files are dated 1970, so the compiled ones must not be compared with their sources by date.
    places = (f"/{HOME}/lib", f"/{TORCH_FILE}")
    inside(
        site,
        root,
        "python3",
        "-m",
        "compileall",
        "-q",
        "-f",
        "-j0",
        "--invalidation-mode=unchecked-hash",
        *places,
    )
    inside(
        site, root, "HF_HUB_OFFLINE=1", f"PYTHONPATH=/{HOME}/lib", f"/{HOME}/bin/llamafactory-cli", "version"
    )
    compiled = root / TORCH_FILE.replace("metadata.py", "__pycache__/metadata.cpython-311.pyc")
    mended = [Entry(str(path.relative_to(root)), path, mode=0o644) for path in (root / TORCH_FILE, compiled)]
    write_layer(site.out / LAYER, [*tree(root / HOME, HOME), *mended])
    remove(root)


def build_base_model(site: Site) -> None:
    """The base model and the data set."""
    files = site.repo / "lab" / "images" / "recipe"
    root = unpack(site)
    work = root / "recipe"
    work.mkdir()
    for name in ("corpus.py", "base_model.py"):
        shutil.copy(files / name, work)
    site.say("training the base model")
    # One thread: others are compiling meanwhile, and two that wait for each other take longer.
    settings = ("HF_HUB_OFFLINE=1", "PYTHONUNBUFFERED=1", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")
    inside(site, root, *settings, "python3", "/recipe/base_model.py", "/recipe/out")
    write_layer(site.out / LAYER, tree(work / "out", SHARE))
    remove(root)


def recipe_steps(repo: Path) -> list[Step]:
    """The layers above the training image's."""
    files = repo / "lab" / "images" / "recipe"
    recipe = (unpack, inside, tree, write_layer)
    return [
        Step(
            kind="layer",
            name="llamafactory",
            lane="debian",
            build=build_llamafactory,
            gib=0.8,
            needs=("train-rootfs",),
            files=(files / "requirements.txt", files / "llamafactory-cli", files / "inside"),
            values=(HOME, PATH, TORCH_FILE, TORCH_FAULT, TORCH_REMEDY),
            recipe=(*recipe, install_wheels, drop_tests, mend),
        ),
        Step(
            kind="layer",
            name="base-model",
            lane="debian",
            build=build_base_model,
            gib=0.1,
            needs=("train-rootfs",),
            files=(files / "corpus.py", files / "base_model.py", files / "inside"),
            values=(SHARE, PATH),
            recipe=recipe,
        ),
    ]
