"""The lab's builder: keys, the cache's promises, archives, the order of steps, what it asks of a machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.build import checks
from lab.build.cache import KEY_LENGTH, Cache, cache_root, copy_tree, key_of
from lab.build.cli import CHARTS, CRDS, IN_IMAGES
from lab.build.images import REFERENCES, image_steps
from lab.build.oci import Entry, ImageConfig, write_archive, write_layer
from lab.build.process import BuildError, run
from lab.build.programs import GROUPS, without_dependencies
from lab.build.seed import SHARED, written_files
from lab.build.steps import Plan, Site, Step

REPO = Path(__file__).resolve().parents[2]
REFERENCE = "docker.io/lab/thing:v1"


# --- cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"GPU_SLICES_CACHE": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/gpu-slices"),
        ({"HOME": "/h"}, "/h/.cache/gpu-slices"),
        ({"GPU_SLICES_CACHE": "", "HOME": "/h"}, "/h/.cache/gpu-slices"),
    ],
)
def test_cache_root(environ, expected):
    assert cache_root(environ) == Path(expected)


def test_key_is_of_content_not_of_place(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "go.mod").write_text("module x\n")
    first = key_of({"a": 1}, {"go.mod": tmp_path / "one" / "go.mod"})
    assert first == key_of({"a": 1}, {"go.mod": tmp_path / "two" / "go.mod"})
    assert len(first) == KEY_LENGTH


def test_key_changes_with_every_input(tmp_path):
    file = tmp_path / "f"
    file.write_text("x")
    keys = [key_of({"a": 1}, {"f": file}), key_of({"a": 2}, {"f": file}), key_of({"a": 1}, {"g": file})]
    file.chmod(0o755)
    keys.append(key_of({"a": 1}, {"f": file}))
    file.write_text("y")
    keys.append(key_of({"a": 1}, {"f": file}))
    assert len(set(keys)) == len(keys)


def test_failed_build_leaves_nothing_under_the_final_name(tmp_path):
    cache = Cache(tmp_path)
    final = cache.path("go", "kube", "0" * KEY_LENGTH)

    def build() -> None:
        with cache.new(final) as out:
            (out / "half").write_text("x")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        build()
    assert not final.exists()
    assert list(final.parent.iterdir()) == []


def test_finished_build_replaces_what_was_there(tmp_path):
    cache = Cache(tmp_path)
    final = cache.path("go", "kube", "0" * KEY_LENGTH)
    for text in ("old", "new"):
        with cache.new(final) as out:
            (out / text).write_text(text)
    assert [path.name for path in final.iterdir()] == ["new"]


def test_what_a_killed_builder_left_is_dropped(tmp_path):
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]);"
        "from pathlib import Path; from lab.build.cache import Cache;"
        "cache = Cache(Path(sys.argv[2])); lock = cache.locked('go', 'kube', print); lock.__enter__();"
        "context = cache.new(cache.path('go', 'kube', '0' * 16)); out = context.__enter__();"
        "(out / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(REPO), str(tmp_path)], check=False)
    assert done.returncode == -9
    cache = Cache(tmp_path)
    assert [path.name for path in entries(tmp_path)] == [f".partial-kube-{'0' * KEY_LENGTH}"]
    cache.sweep([("go", "kube"), ("go", "etcd")])
    assert entries(tmp_path) == []


def test_what_is_being_built_is_not_swept_away(tmp_path):
    cache = Cache(tmp_path)
    final = cache.path("go", "kube", "0" * KEY_LENGTH)
    with cache.locked("go", "kube", lambda: None), cache.new(final) as out:
        cache.sweep([("go", "kube")])
        assert out.is_dir()
    assert entries(tmp_path) == [final]


def entries(root: Path) -> list[Path]:
    """What lies among the Go programs of a cache, without the locks."""
    return [path for path in (root / "build" / "go").iterdir() if path.suffix != ".lock"]


def test_old_versions_go_and_the_current_one_stays(tmp_path):
    cache = Cache(tmp_path)
    paths = [cache.path("go", "kube", str(number) * KEY_LENGTH) for number in range(4)]
    for number, path in enumerate(paths):
        path.mkdir(parents=True)
        os.utime(path, (number, number))
    other = cache.path("go", "kube-extra", "0" * KEY_LENGTH)
    other.mkdir()
    # The current one is the oldest here, as after going back to an earlier commit.
    gone = cache.drop_old("go", "kube", paths[0], keep=2)
    assert sorted(gone) == [paths[1], paths[2]]
    assert paths[0].is_dir()
    assert paths[3].is_dir()
    assert other.is_dir()


def test_an_old_version_that_a_node_has_mounted_stays(tmp_path):
    cache = Cache(tmp_path)
    used, unused, current = (cache.path("seed", "containerd", letter * KEY_LENGTH) for letter in "abc")
    for path in (used, unused, current):
        path.mkdir(parents=True)
    processes = tmp_path / "proc"
    for pid, root in ((1, "/"), (7, f"{used}/root/snapshots/3"), (8, f"{used}/root/snapshots/4")):
        (processes / str(pid)).mkdir(parents=True)
        line = f"2290 2223 253:0 {root} /var/lib/containerd/snapshots/3 ro,relatime - ext4 /dev/vda rw\n"
        (processes / str(pid) / "mountinfo").write_text(line)
    (processes / "9").mkdir()  # ended meanwhile
    assert cache.drop_old("seed", "containerd", current, keep=1, processes=processes) == [unused]
    assert used.is_dir()
    assert current.is_dir()
    (processes / "7" / "mountinfo").unlink()
    (processes / "8" / "mountinfo").write_text("")
    assert cache.drop_old("seed", "containerd", current, keep=1, processes=processes) == [used]


def test_second_builder_waits_and_says_so(tmp_path):
    cache = Cache(tmp_path)
    order: list[str] = []

    def second() -> None:
        with cache.locked("go", "kube", lambda: order.append("waiting")):
            order.append("second")

    with cache.locked("go", "kube", lambda: order.append("never")):
        thread = threading.Thread(target=second)
        thread.start()
        while not order:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["waiting", "first", "second"]


def test_copied_tree_is_writable(tmp_path):
    source = tmp_path / "module"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (source / "sub" / "run.sh").chmod(0o555)
    (source / "values.yaml").write_text("a: 1\n")
    (source / "values.yaml").chmod(0o444)
    (source / "sub").chmod(0o555)
    copy_tree(source, tmp_path / "copy")
    modes = [
        oct((tmp_path / "copy" / name).stat().st_mode & 0o777)
        for name in ("sub", "sub/run.sh", "values.yaml")
    ]
    assert modes == ["0o755", "0o755", "0o644"]


# --- steps ------------------------------------------------------------------------------------------------


def make_plan(tmp_path: Path, built: list[str], values: str = "", fail: str = "") -> Plan:
    """A plan a -> b -> c and a lone d, whose builds note their names in `built`."""

    def step(name: str, *needs: str) -> Step:
        def build(site: Site) -> None:
            if name == fail:
                raise BuildError(f"{name} is broken")
            for need in needs:
                assert (site.needs[need] / "done").is_file()
            (site.out / "done").write_text(name)
            built.append(name)

        own = (values,) if name == "a" else ()
        lane = "slow" if name == "d" else "fast"
        return Step(kind="k", name=name, lane=lane, build=build, gib=0.0, needs=needs, values=own)

    return Plan([step("a"), step("b", "a"), step("c", "b"), step("d")], tmp_path, Cache(tmp_path / "cache"))


def test_steps_run_after_what_they_need_and_only_once(tmp_path):
    built: list[str] = []
    lines: list[str] = []
    plan = make_plan(tmp_path, built)
    plan.run(plan.missing(["c", "d"]), lines.append)
    assert sorted(built) == ["a", "b", "c", "d"]
    assert [name for name in built if name != "d"] == ["a", "b", "c"]
    assert any(line.startswith("c: built in ") for line in lines)
    assert make_plan(tmp_path, built).missing(["a", "b", "c", "d"]) == []


def test_changed_input_rebuilds_what_depends_on_it_alone(tmp_path):
    built: list[str] = []
    first = make_plan(tmp_path, built)
    first.run(first.missing(["a", "b", "c", "d"]), lambda _: None)
    assert make_plan(tmp_path, built, values="other").missing(["a", "b", "c", "d"]) == ["a", "b", "c"]


def test_input_of_a_built_thing_is_not_built_again(tmp_path):
    built: list[str] = []
    plan = make_plan(tmp_path, built)
    plan.run(plan.missing(["c"]), lambda _: None)
    for file in plan.paths["a"].iterdir():
        file.unlink()
    plan.paths["a"].rmdir()
    assert plan.missing(["c"]) == []
    assert plan.missing(["b", "a"]) == ["a"]


def test_failure_is_raised_and_keeps_what_was_complete(tmp_path):
    built: list[str] = []
    plan = make_plan(tmp_path, built, fail="b")
    with pytest.raises(BuildError, match="b is broken"):
        plan.run(plan.missing(["c"]), lambda _: None)
    assert built == ["a"]
    assert plan.missing(["c"]) == ["b", "c"]


def test_failed_program_is_told_with_the_end_of_its_output(tmp_path):
    with pytest.raises(BuildError) as caught:
        run(["sh", "-c", "seq 100; echo the reason >&2; exit 3"], tmp_path / "log")
    text = str(caught.value)
    assert "`sh` ended with status 3" in text
    assert text.endswith("the reason")
    assert "\n    50\n" not in text
    assert (tmp_path / "log").read_text().count("\n") == 102


# --- layers and archives ----------------------------------------------------------------------------------


def read_archive(path: Path) -> dict[str, bytes]:
    """All files of an archive."""
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name: archive.extractfile(member).read() for member in members}


def test_layer_has_parents_links_and_modes(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    entries = [
        Entry("/usr/bin/program", program),
        Entry("bin", link="usr/bin"),
        Entry("tmp", mode=0o1777),
        Entry("etc/conf", program, mode=0o644),
    ]
    write_layer(tmp_path / "layer.tar", entries)
    with tarfile.open(tmp_path / "layer.tar") as layer:
        found = {member.name: member for member in layer.getmembers()}
        content = layer.extractfile("usr/bin/program").read()
    assert list(found) == ["bin", "etc", "etc/conf", "tmp", "usr", "usr/bin", "usr/bin/program"]
    assert content == b"\x7fELF"
    assert found["bin"].linkname == "usr/bin"
    assert found["tmp"].mode == 0o1777
    assert (found["etc/conf"].mode, found["usr/bin/program"].mode) == (0o644, 0o755)
    assert {(member.uid, member.gid, member.mtime) for member in found.values()} == {(0, 0, 0)}


def test_layer_refuses_a_path_twice(tmp_path):
    with pytest.raises(ValueError, match="usr/bin/x is given twice"):
        write_layer(tmp_path / "layer.tar", [Entry("usr/bin/x"), Entry("/usr/bin/x", link="y")])


def test_archive_is_a_complete_oci_layout(tmp_path):
    layer = tmp_path / "layer.tar"
    write_layer(layer, [Entry("tmp", mode=0o1777)])
    config = ImageConfig(entrypoint=("/manager",), user="65532:65532", env={"B": "2", "A": "1"})
    digest = write_archive(tmp_path / "image.tar", REFERENCE, [layer], config)
    files = read_archive(tmp_path / "image.tar")

    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["digest"] == digest
    assert entry["annotations"]["io.containerd.image.name"] == REFERENCE

    def blob(descriptor: dict) -> bytes:
        content = files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
        assert len(content) == descriptor["size"]
        return content

    manifest = json.loads(blob(entry))
    image = json.loads(blob(manifest["config"]))
    assert blob(manifest["layers"][0]) == layer.read_bytes()
    assert image["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert (image["os"], image["architecture"]) == ("linux", "amd64")
    assert image["config"] == {
        "Entrypoint": ["/manager"],
        "Env": ["A=1", "B=2"],
        "User": "65532:65532",
        "WorkingDir": "/",
    }


@settings(deadline=None, max_examples=20)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}){0,2}", fullmatch=True), st.binary(max_size=64), max_size=6
    )
)
def test_same_content_gives_the_same_bytes(tmp_path_factory, contents):
    # A path cannot be both a file and the directory of another.
    names = [name for name in contents if not any(other.startswith(f"{name}/") for other in contents)]
    archives = []
    for order in (names, names[::-1]):
        place = tmp_path_factory.mktemp("image")
        entries = []
        for number, name in enumerate(order):
            source = place / f"source{number}"
            source.write_bytes(contents[name])
            os.utime(source, (number + 1000, number + 1000))
            entries.append(Entry(name, source))
        write_layer(place / "layer.tar", entries)
        write_archive(place / "image.tar", REFERENCE, [place / "layer.tar"], ImageConfig())
        archives.append((place / "image.tar").read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as archive:
        assert {member.mtime for member in archive.getmembers()} == {0}


# --- programs ---------------------------------------------------------------------------------------------


def test_only_the_dependencies_block_leaves_the_chart():
    chart = (
        "apiVersion: v2\n\ndependencies:\n- name: jobset\n  version: 0.12.0\n  condition: jobset.install\n"
        "- name: lws\n  version: 0.8.0\n\nkeywords:\n- trainer\n\nhome: here\n"
    )
    assert without_dependencies(chart) == "apiVersion: v2\n\nkeywords:\n- trainer\n\nhome: here\n"


def test_dependencies_at_the_end_and_indented():
    chart = "name: x\ndependencies:\n  - name: jobset\n    version: 0.12.0\n"
    assert without_dependencies(chart) == "name: x\n"


def test_chart_without_dependencies_is_refused():
    with pytest.raises(ValueError, match="no dependencies block"):
        without_dependencies("name: x\nversion: 1\n")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_group_is_pinned_and_declares_its_programs(group):
    module = REPO / "lab" / group.name
    text = (module / "go.mod").read_text()
    assert f"{group.module} v" in text or f"{group.module} =>" in text
    for package in group.programs.values():
        if package != ".":
            assert package in text
    assert f"{group.module} v" in (module / "go.sum").read_text()


def test_stamped_kubernetes_version_is_the_pinned_one():
    kube = next(group for group in GROUPS if group.name == "kube")
    stamps = {name.rpartition(".")[2]: value for name, value in kube.stamps.items()}
    text = (REPO / "lab" / "kube" / "go.mod").read_text()
    assert f"k8s.io/kubernetes {stamps['gitVersion']}" in text
    major, minor, patch = stamps["gitVersion"].lstrip("v").split(".")
    assert (stamps["gitMajor"], stamps["gitMinor"]) == (major, minor)
    staging = {line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("replace k8s.io/")}
    assert staging == {f"v0.{minor}.{patch}"}


def test_every_program_for_images_is_in_one_and_each_chart_has_a_group():
    copies = {group.name: group.copies for group in GROUPS}
    assert set(IN_IMAGES) <= set(copies)
    assert all("chart" in copies[group] for group in CHARTS.values())
    assert all("crds" in copies[group] for group in CRDS.values())
    needed = {need for step in image_steps(REPO) for need in step.needs}
    assert set(IN_IMAGES) <= needed


@pytest.mark.parametrize("name", ["jobset", "trainer", "kueue"])
def test_an_operator_s_image_is_tagged_with_the_pinned_version(name):
    group = next(group for group in GROUPS if group.name == name)
    version = REFERENCES[name].rpartition(":")[2]
    assert f"{group.module} {version} " in (REPO / "lab" / name / "go.mod").read_text()


# --- seed -------------------------------------------------------------------------------------------------


def test_files_written_in_place_are_those_outside_the_shared_trees(tmp_path):
    for path in (
        f"{SHARED[0]}/sha256/abc",
        f"{SHARED[1]}/1/fs/usr/bin/python3",
        "io.containerd.metadata.v1.bolt/meta.db",
        "io.containerd.snapshotter.v1.overlayfs/metadata.db",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    assert written_files(tmp_path) == [
        "io.containerd.metadata.v1.bolt/meta.db",
        "io.containerd.snapshotter.v1.overlayfs/metadata.db",
    ]


# --- checks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"), [("go1.26.8", (1, 26, 8)), ("1.26", (1, 26)), ("devel", ()), ("go1.27rc1", (1, 27))]
)
def test_version_numbers(text, numbers):
    assert checks.version_numbers(text) == numbers


def test_wanted_go_is_the_newest_asked_for(tmp_path):
    for name, version in (("a", "1.25.0"), ("b", "1.26.10"), ("c", "1.26.9")):
        (tmp_path / name).write_text(f"module x\n\ngo {version}\n\nrequire go.uber.org/x v1.99.0\n")
    assert checks.wanted_go(tmp_path.iterdir()) == "1.26.10"


@pytest.mark.parametrize(
    ("system", "machine", "uid", "words"),
    [
        ("Linux", "x86_64", 0, []),
        ("Linux", "aarch64", 0, ["Linux on aarch64"]),
        ("Darwin", "arm64", 501, ["Darwin on arm64", "uid 501"]),
        ("Linux", "x86_64", 1000, ["uid 1000"]),
    ],
)
def test_platform(system, machine, uid, words):
    faults = checks.check_platform(system, machine, uid)
    assert len(faults) == len(words)
    for fault, word in zip(faults, words):
        assert word in fault


@pytest.mark.parametrize(
    ("found", "toolchain", "words"),
    [
        ("go1.26.8", "local", None),
        ("go1.27.0", "local", None),
        ("go1.24.4", "auto", None),
        ("go1.24.4", "go1.24.0+auto", None),
        ("go1.24.4", "local", "set GOTOOLCHAIN=auto"),
        ("go1.26.7", "local", "needed 1.26.8"),
        ("go1.24.4", "go1.24.4", "set GOTOOLCHAIN=auto"),
        ("go1.19.8", "", "install a newer Go"),
        (None, "", "not found in PATH"),
    ],
)
def test_go(found, toolchain, words):
    faults = checks.check_go(found, toolchain, "1.26.8")
    assert len(faults) == (0 if words is None else 1)
    assert words is None or words in faults[0]


@pytest.mark.parametrize(
    ("free", "needed", "fault"), [(8.1, 3.0, False), (7.9, 0.0, True), (9.0, 12.0, True), (12.0, 12.0, False)]
)
def test_disk(free, needed, fault):
    faults = checks.check_disk(free, needed, "/cache")
    assert bool(faults) is fault
    assert all(f"{free:.1f} GiB free at /cache" in text for text in faults)


def test_packages_are_named_and_asked_for_only_where_they_cannot_be_installed():
    tools = (checks.Tool("podman", "podman"), checks.Tool("libc6-dev", "/usr/include/stdio.h"))
    missing = checks.missing_packages({"podman": True, "/usr/include/stdio.h": False}, tools)
    assert missing == ["libc6-dev"]
    assert checks.check_packages(missing, can_install=True) == []
    assert checks.check_packages([], can_install=False) == []
    (fault,) = checks.check_packages(missing, can_install=False)
    assert "missing libc6-dev" in fault


# --- command line -----------------------------------------------------------------------------------------


def builder(tmp_path: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the builder with a cache of its own and only what is in `bin` of tmp_path and `environ`."""
    env = {
        "GPU_SLICES_CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
        "PATH": str(tmp_path / "bin"),
        **environ,
    }
    command = [sys.executable, str(REPO / "lab" / "build"), *argv]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=60)


def fake_go(tmp_path: Path, version: str, toolchain: str) -> None:
    """A `go` that only says its version."""
    (tmp_path / "bin").mkdir()
    go = tmp_path / "bin" / "go"
    go.write_text(f"#!{sys.executable}\nprint('{version}\\n{toolchain}')\n")
    go.chmod(0o755)


def test_old_go_is_named_before_anything_is_done(tmp_path):
    fake_go(tmp_path, "go1.24.4", "local")
    for argv in ((), ("--check",), ("kube",)):
        done = builder(tmp_path, *argv)
        assert done.returncode == 2
        assert "found go1.24.4 with GOTOOLCHAIN=local" in done.stderr
        assert "GOTOOLCHAIN=auto" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "cache").exists()


def test_all_faults_come_together(tmp_path):
    done = builder(tmp_path, "--check")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "The lab cannot be built here. Nothing was changed."
    assert any(line.startswith("- Go: not found") for line in lines)
    assert any(line.startswith("- programs: missing podman") for line in lines)


def test_unknown_target_names_those_there_are(tmp_path):
    fake_go(tmp_path, "go1.99.0", "local")
    done = builder(tmp_path, "kubelet")
    assert done.returncode == 2
    assert "no such target: kubelet; there are " in done.stderr
    assert "kube," in done.stderr


def test_manifest_of_an_empty_cache_says_that_all_is_missing(tmp_path):
    fake_go(tmp_path, "go1.99.0", "local")
    done = builder(tmp_path, "--manifest")
    assert done.returncode == 0
    manifest = json.loads(done.stdout)
    assert manifest["bin"] == {}
    assert manifest["containerd_seed"] is None
    assert {"kube", "containerd", "silicon", "train-image"} <= set(manifest["missing"])
    assert not (tmp_path / "cache").exists()
