"""Who holds what; what a pod sees; many processes at once; processes killed at the wrong moment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from silicon_node import MakeNode, Node

WORKLOAD = """
import json, os, sys
import pynvml as n
n.nvmlInit()
device = n.nvmlDeviceGetHandleByIndex(0)
mig = n.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
print(json.dumps({"count": n.nvmlDeviceGetCount(), "uuid": n.nvmlDeviceGetUUID(mig),
    "name": n.nvmlDeviceGetName(mig), "mib": n.nvmlDeviceGetMemoryInfo(mig).total >> 20, "pid": os.getpid(),
    "pids": [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(mig)]}), flush=True)
n.nvmlShutdown()
input()
"""


@pytest.fixture
def cut(a30: Node) -> Node:
    """An A30 cut into four; instances 3, 4, 5, 6."""
    a30.ok("-mig", "1")
    a30.ok("mig", "-cgi", "14,14,14,14", "-C")
    return a30


def caps(gi: int) -> tuple[str, str, str]:
    """Device nodes of a claim on one MIG device of GPU 0."""
    return "nvidia0", f"nvidia-caps/nvidia-cap{3 + 9 * gi}", f"nvidia-caps/nvidia-cap{4 + 9 * gi}"


def apps(node: Node) -> list[list[str]]:
    said = node.ok("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    return [line.split(", ") for line in said.splitlines()]


# ---- pods ----


def test_a_pod_sees_exactly_the_device_it_was_given(cut: Node) -> None:
    lines = cut.mig_lines()
    for index, gi in enumerate((3, 4, 5, 6)):
        env = cut.pod(f"pod{gi}", *caps(gi))
        seen = cut.smi("-L", env=env).stdout.splitlines()
        assert seen[0] == cut.ok("-L").splitlines()[0]
        assert [line.split("UUID")[1] for line in seen[1:]] == [lines[index].split("UUID")[1]]
        assert seen[1].startswith("  MIG 1g.6gb      Device  0:")
        assert re.findall(r"MIG 1g.6gb +14 +(\d)", cut.smi("mig", "-lgi", env=env).stdout) == [str(gi)]
        assert cut.smi("-q", "-x", env=env).stdout.count("<mig_device>") == 1
        assert cut.smi(env=env).stdout.count("MiB /  5952MiB") == 1


def test_a_pod_with_two_claims_and_one_without(cut: Node) -> None:
    two = cut.pod("two", *caps(3), *caps(5))
    assert cut.smi("-L", env=two).stdout.count("MIG-") == 2
    none = cut.pod("none")
    done = cut.smi("-L", env=none)
    assert (done.stdout, done.returncode) == ("No devices were found\n", 6)
    assert cut.python("import pynvml as n\nn.nvmlInit()\nprint(n.nvmlDeviceGetCount())", none) == "0\n"
    # The GPU instance's node alone is not enough.
    half = cut.pod("half", "nvidia0", "nvidia-caps/nvidia-cap30")
    assert "MIG-" not in cut.smi("-L", env=half).stdout


def test_gpus_are_counted_from_zero_in_a_pod(make_node: MakeNode) -> None:
    node: Node = make_node("H200,H200,H200")
    uuids = node.ok("--query-gpu=uuid", "--format=csv,noheader").split()
    env = node.pod("pod", "nvidia2", "nvidia1")
    seen = node.smi("--query-gpu=index,uuid,count", "--format=csv,noheader", env=env).stdout
    assert seen == f"0, {uuids[1]}, 2\n1, {uuids[2]}, 2\n"
    assert node.smi("-i", uuids[0], env=env).returncode == 6


def test_a_pod_cannot_change_the_node(cut: Node) -> None:
    env = cut.pod("pod", *caps(3))
    for argv in (["-mig", "0"], ["mig", "-dci"], ["mig", "-cgi", "14"], ["-c", "1"]):
        before = cut.show()["gpus"][0]["instances"]
        done = cut.smi(*argv, env=env)
        assert done.returncode != 0, argv
        assert cut.show()["gpus"][0]["instances"] == before
    assert cut.smi("mig", "-dci", env=env).returncode == 4


def test_a_process_in_a_pod_computes_on_its_instance(cut: Node) -> None:
    env = cut.pod("pod", *caps(4))
    child = cut.popen([sys.executable, "-c", WORKLOAD], env, stdin=subprocess.PIPE)
    seen = json.loads(child.stdout.readline())
    assert (seen["count"], seen["name"], seen["mib"]) == (1, "NVIDIA A30 MIG 1g.6gb", 5952)
    assert seen["uuid"] in cut.mig_lines()[1]
    assert seen["pids"] == [seen["pid"]]
    [(pid, name, memory)] = apps(cut)
    assert (int(pid), name) == (child.pid, sys.executable)
    assert 5 < int(memory) < 500  # what the process keeps in memory
    used = re.search(r"\| *0 +4 +0 +1 +\| +(\d+)MiB /  5952MiB", cut.ok())
    assert abs(int(used[1]) - int(memory) - 12) <= 5
    row = re.search(rf"\|    0    4    0 +{child.pid} +C +\S+ +(\d+)MiB \|", cut.ok())
    assert row
    assert re.search(rf"<pid>{child.pid}</pid>", cut.ok("-q", "-x"))

    refused = cut.smi("mig", "-dci", "-gi", "4")
    assert (refused.stdout, refused.returncode) == (
        "Unable to destroy compute instance ID  0 from GPU  0 GPU instance ID  4: In use by another client\n"
        "Failed to destroy compute instances: In use by another client\n",
        19,
    )
    assert "pending disable" in cut.ok("-mig", "0")
    cut.ok("-mig", "1")
    cut.ok("mig", "-dci", "-gi", "5")  # the others are free

    child.stdin.write("\n")
    child.stdin.flush()
    child.wait()
    assert apps(cut) == []
    cut.ok("mig", "-dci", "-gi", "4")


def test_pids_are_those_of_the_asker(cut: Node) -> None:
    """A pod has its own PID namespace; the node sees its processes under the node's numbers."""
    env = cut.pod("pod", *caps(6))
    child = cut.popen(
        [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
            "lab-silicon hold --gpu 0 --gi 6 --memory 77 & read; nvidia-smi; wait",
        ],
        env,
        stdin=subprocess.PIPE,
    )
    assert child.stdout.readline() == "held by pid 2\n"
    child.stdin.write("\n")
    child.stdin.flush()
    [(pid, name, memory)] = apps(cut)
    assert name == "lab-silicon"
    assert int(pid) > 2
    assert Path(f"/proc/{pid}/comm").read_text() == "lab-silicon\n"
    assert memory == "77"
    # In the pod the process is number 2; another pod does not see it.
    inside = ""
    for line in child.stdout:
        inside += line
        if "77MiB |" in line:
            break
    assert re.search(r"\|    0    6    0 +2      C   lab-silicon +77MiB \|", inside)
    other = cut.popen(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "nvidia-smi"], env)
    assert "No running processes found" in other.stdout.read()
    os.kill(int(pid), signal.SIGKILL)
    child.wait()
    assert apps(cut) == []


def test_any_user_can_hold_a_device(cut: Node) -> None:
    holder = cut.hold("--gpu", "0", "--gi", "3", "--memory", "9", env=cut.pod("pod", *caps(3)), user=65534)
    assert [row[0] for row in apps(cut)] == [str(holder.pid)]
    assert cut.smi("mig", "-dci", "-gi", "3").returncode == 19
    holder.terminate()
    holder.wait()
    cut.ok("mig", "-dci", "-gi", "3")


def test_a_holder_that_is_ended_at_once_lets_go(cut: Node) -> None:
    """A signal that comes between its line and its wait counts too."""
    for _ in range(40):
        holder = cut.hold("--gpu", "0", "--gi", "3")
        holder.terminate()
        assert holder.wait(10) == 0
    assert apps(cut) == []


def test_a_holder_lets_go_after_its_seconds(cut: Node) -> None:
    holder = cut.hold("--gpu", "0", "--gi", "3", "--seconds", "1")
    assert len(apps(cut)) == 1
    assert holder.wait(10) == 0
    assert apps(cut) == []


def test_whole_gpu_in_a_pod(h200: Node) -> None:
    env = h200.pod("pod", "nvidia0")
    child = h200.popen(
        [
            sys.executable,
            "-c",
            "import pynvml as n\nn.nvmlInit()\nn.nvmlDeviceGetHandleByIndex(0)\nprint(flush=True)\ninput()",
        ],
        env,
        stdin=subprocess.PIPE,
    )
    child.stdout.readline()
    assert [row[0] for row in apps(h200)] == [str(child.pid)]
    assert "pending enable" in h200.ok("-mig", "1")


def test_a_forked_child_holds_nothing_of_its_parents(a30: Node) -> None:
    script = """
import os, sys
import pynvml as n
n.nvmlInit()
n.nvmlDeviceGetHandleByIndex(0)
if os.fork() == 0:
    sys.stdin.read()
    n.nvmlDeviceGetCount()
    os._exit(0)
print("forked", flush=True)
"""
    parent = a30.popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    assert parent.stdout.readline() == "forked\n"
    parent.wait()
    assert "Enabled MIG Mode" in a30.ok("-mig", "1")


def test_many_clients_and_their_entries_return(cut: Node) -> None:
    holders = [cut.hold("--gpu", "0", "--gi", "5", "--memory", "1") for _ in range(30)]
    assert len(apps(cut)) == 30
    for holder in holders:
        holder.kill()
    for holder in holders:
        holder.wait()
    assert apps(cut) == []
    assert len([cut.hold("--gpu", "0", "--gi", "5") for _ in range(3)]) == 3
    assert len(apps(cut)) == 3


# ---- many at once ----


def test_creating_from_many_processes_never_overlaps(make_node: MakeNode) -> None:
    node: Node = make_node("H200,H200")
    node.ok("-mig", "1")
    started = [node.popen(["nvidia-smi", "mig", "-i", str(i % 2), "-cgi", "19", "-C"]) for i in range(24)]
    status = [child.wait() for child in started]
    assert sorted(set(status)) == [0, 23]
    assert status.count(0) == 14
    for gpu in node.show()["gpus"]:
        assert sorted(i["start"] for i in gpu["instances"]) == [0, 1, 2, 3, 4, 5, 6]
        assert len({i["gi"] for i in gpu["instances"]}) == 7
    assert len(set(node.mig_lines())) == 14


def test_readers_always_see_a_whole_state(h200: Node) -> None:
    h200.ok("-mig", "1")
    writer = h200.popen(
        [
            "bash",
            "-c",
            "while :; do nvidia-smi mig -cgi 9 -C && nvidia-smi mig -dci && "
            "nvidia-smi mig -dgi; done >/dev/null",
        ],
        start_new_session=True,
    )
    seen = set()
    try:
        for _ in range(60):
            shown = h200.show()["gpus"][0]["instances"]
            assert len(shown) <= 1
            seen.add(len(shown))
            assert h200.smi("-L").returncode == 0
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.wait()
    assert seen == {0, 1}


# ---- killed at the wrong moment ----


def test_kill_at_any_moment_leaves_a_whole_state(h200: Node) -> None:
    h200.ok("-mig", "1")
    chance = random.Random(1)  # noqa: S311
    last = 0
    for _ in range(40):
        child = h200.popen(
            [
                "bash",
                "-c",
                "while :; do nvidia-smi mig -cgi 19,19 -C; nvidia-smi mig -dci; "
                "nvidia-smi mig -dgi; done >/dev/null",
            ],
            start_new_session=True,
        )
        time.sleep(chance.uniform(0.005, 0.06))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        shown = h200.show()
        assert shown["generation"] >= last
        last = shown["generation"]
        assert len(shown["gpus"][0]["instances"]) <= 7
    assert last > 10  # there was something to interrupt
    h200.ok("-r")
    h200.ok("mig", "-cgi", "19", "-C")
    assert len(h200.mig_lines()) == 1


def newest_slot(data: bytes) -> tuple[int, int, int]:
    """(offset, generation, body length) of the newest slot; slots lie one after another."""
    found = []
    for offset in range(0, len(data), 4096):
        if data[offset : offset + 8] == b"LABGPU02":
            generation, length = struct.unpack_from("<QQ", data, offset + 8)
            found.append((generation, offset, length))
    assert len(found) == 2
    generation, offset, length = max(found)
    return offset, generation, length


@pytest.mark.parametrize("part", ["body", "header"])
def test_a_torn_write_falls_back_to_the_state_before(h200: Node, part: str) -> None:
    """What a writer killed half-way leaves: one slot that is not whole."""
    h200.ok("-mig", "1")
    h200.ok("mig", "-cgi", "19")
    h200.ok("mig", "-cgi", "19")
    offset, generation, length = newest_slot(h200.state.read_bytes())
    with h200.state.open("r+b") as f:
        f.seek(offset + (4096 + length // 2 if part == "body" else 16))
        f.write(bytes(range(1, 21)))
    shown = h200.show()
    assert shown["generation"] == generation - 1
    assert len(shown["gpus"][0]["instances"]) == 1
    h200.ok("mig", "-cgi", "19")
    assert len(h200.show()["gpus"][0]["instances"]) == 2


def test_a_file_that_holds_nothing_whole_is_said_to_be_broken(h200: Node) -> None:
    size = h200.state.stat().st_size
    h200.state.write_bytes(b"\0" * size)
    done = h200.silicon("show", check=False)
    assert done.returncode == 1
    assert str(h200.state) in done.stderr
    h200.init("H200")
    assert h200.mode() == ("Disabled", "Disabled")


# ---- as other tools find a holder ----


def open_files(pid: int) -> set[str]:
    """What a process has open, as lsof or fuser would find it."""
    return {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}


def test_a_client_has_its_device_nodes_open(cut: Node) -> None:
    env = cut.pod("pod", *caps(3))
    holder = cut.hold("--gpu", "0", "--gi", "3", env=env)
    dev = cut.home / "pod"
    assert {str(dev / node) for node in caps(3)} <= open_files(holder.pid)
    script = """
import os
import pynvml as n
def nodes():
    links = [f"/proc/self/fd/{f}" for f in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.exists(link)]
    return sorted(os.path.basename(t) for t in targets if "/dev/nvidia" in t)
n.nvmlInit()
print(nodes())
for _ in range(3):
    n.nvmlDeviceGetHandleByIndex(0)
print(nodes())
n.nvmlShutdown()
print(nodes())
"""
    assert cut.python(script).splitlines() == ["[]", "['nvidia0']", "[]"]
