"""MIG mode and instances over their life, as on hardware."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from silicon_node import FIXTURES, MakeNode, Node

BUS = "00000000:00:06.0"
IN_USE = (
    f"{BUS} is currently being used by one or more other processes (e.g. CUDA application or a monitoring "
    "application such as another instance of nvidia-smi). Please first kill all processes using the device "
    "and retry the command or reboot the system to make MIG mode effective.\n"
)
MONITOR = """
import pynvml as n
n.nvmlInit()
n.nvmlDeviceGetHandleByIndex(0)
print("open", flush=True)
input()
n.nvmlShutdown()
print("shut", flush=True)
input()
"""


def gi_made(number: int, name: str, profile: int) -> str:
    """What nvidia-smi says of a new GPU instance."""
    return (
        f"Successfully created GPU instance ID {number:2d} on GPU  0 "
        f"using profile MIG {name} (ID {profile:2d})\n"
    )


def ci_made(number: int, gi: int, name: str, profile: int) -> str:
    """What nvidia-smi says of a new compute instance."""
    return (
        f"Successfully created compute instance ID {number:2d} on GPU  0 GPU instance ID {gi:2d} "
        f"using profile MIG {name} (ID {profile:2d})\n"
    )


def monitor(node: Node) -> subprocess.Popen[str]:
    """A process that has the GPU open through NVML until told otherwise (two lines on its stdin)."""
    child = node.popen([sys.executable, "-c", MONITOR], stdin=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    return child


def capabilities(node: Node) -> set[str]:
    """What the driver would find below /proc/driver/nvidia/capabilities."""
    base = node.root / "proc/driver/nvidia/capabilities"
    return {str(p.relative_to(base)) for p in base.rglob("access")}


def minor(node: Node, path: str) -> int:
    text = (node.root / "proc/driver/nvidia/capabilities" / path).read_text()
    return int(re.fullmatch(r"DeviceFileMinor: (\d+)\nDeviceFileMode: 292\nDeviceFileModify: 1\n", text)[1])


# ---- mode ----


@pytest.mark.parametrize("card", ["A30", "A100-40", "A100-80", "H100", "H200"])
def test_idle_card_changes_mode_at_once(make_node: MakeNode, card: str) -> None:
    node: Node = make_node(card)
    assert node.mode() == ("Disabled", "Disabled")
    assert node.ok("-i", "0", "-mig", "1") == f"Enabled MIG Mode for GPU {BUS}\nAll done.\n"
    assert node.mode() == ("Enabled", "Enabled")
    assert node.ok("-mig", "ENABLED") == f"Enabled MIG Mode for GPU {BUS}\nAll done.\n"
    assert node.ok("-i", BUS, "--multi-instance-gpu=0") == f"Disabled MIG Mode for GPU {BUS}\nAll done.\n"
    assert node.mode() == ("Disabled", "Disabled")


@pytest.mark.parametrize("card", ["A30", "H200"])
def test_a_client_makes_the_change_pending(make_node: MakeNode, card: str) -> None:
    node: Node = make_node(card)
    child = monitor(node)
    assert node.ok("-i", "0", "-mig", "1") == (
        f"Warning: MIG mode is in pending enable state for GPU {BUS}:In use by another client\n"
        f"{IN_USE}All done.\n"
    )
    assert node.mode() == ("Disabled", "Enabled")
    assert "|            Disabled* |" in node.ok()
    refused = node.smi("-i", "0", "--gpu-reset")
    assert refused.returncode == 255
    assert refused.stdout.startswith(
        "The following GPUs could not be reset:\n"
        f"  GPU {BUS}: In use by another client\n\n1 device is currently"
    )
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "shut\n"
    # Nobody has it open any more, but what is pending waits for a reset or for the command once more.
    assert node.mode() == ("Disabled", "Enabled")
    assert node.ok("-i", "0", "-r") == f"GPU {BUS} was successfully reset.\nAll done.\n"
    assert node.mode() == ("Enabled", "Enabled")


def test_a_killed_client_holds_nothing(a30: Node) -> None:
    child = monitor(a30)
    a30.ok("-mig", "1")
    assert a30.mode() == ("Disabled", "Enabled")
    child.kill()
    child.wait()
    assert a30.ok("-mig", "1") == f"Enabled MIG Mode for GPU {BUS}\nAll done.\n"
    assert a30.mode() == ("Enabled", "Enabled")
    assert a30.show()["gpus"][0]["clients"] == []


def test_a_looping_nvidia_smi_is_a_client_and_a_short_one_is_not(a30: Node) -> None:
    child = a30.popen(["nvidia-smi", "-L", "-l", "60"])
    assert child.stdout.readline().startswith("GPU 0")
    assert "pending enable" in a30.ok("-mig", "1")
    child.kill()
    child.wait()
    assert "Enabled MIG Mode" in a30.ok("-mig", "1")


def test_disabling_drops_instances_on_ampere_and_waits_for_them_on_hopper(make_node: MakeNode) -> None:
    for card, pending in (("A30", False), ("H200", True)):
        node: Node = make_node(card)
        node.ok("-mig", "1")
        node.ok("mig", "-cgi", "0", "-C")
        said = node.ok("-mig", "0")
        assert ("In use by another client" in said) == pending
        assert node.mode() == (("Enabled", "Disabled") if pending else ("Disabled", "Disabled"))
        assert len(node.mig_lines()) == (1 if pending else 0)


def test_as_in_a_virtual_machine_without_reset(a30: Node) -> None:
    a30.silicon("fault", "noreset", "--gpu", "0")
    assert a30.ok("-mig", "1") == (
        f"Warning: MIG mode is in pending enable state for GPU {BUS}:Not Supported\nReboot the system or try "
        f"nvidia-smi --gpu-reset to make MIG mode effective on GPU {BUS}\nAll done.\n"
    )
    assert a30.mode() == ("Disabled", "Enabled")
    assert a30.smi("-r").returncode == 255
    a30.silicon("reboot")
    assert a30.mode() == ("Enabled", "Enabled")


def test_only_root_changes_anything(a30: Node) -> None:
    for argv, said, status in (
        (["-mig", "1"], f"Unable to enable MIG Mode for GPU {BUS}: Insufficient Permissions\n", 4),
        (["-pm", "0"], f"Unable to set persistence mode for GPU {BUS}: Insufficient Permissions\n", 4),
        (["-r"], "Resetting GPUs requires root privileges.\n", 4),
    ):
        done = subprocess.run(
            ["nvidia-smi", *argv], env=a30.env, user=65534, capture_output=True, text=True, check=False
        )
        assert (done.stdout.startswith(said), done.returncode) == (True, status), done.stdout
    assert a30.mode() == ("Disabled", "Disabled")


# ---- instances ----


def test_create_list_destroy(a30: Node) -> None:
    assert a30.smi("mig", "-cgi", "14").stdout == "No MIG-enabled devices found.\n"
    a30.ok("-mig", "1")
    for what, listing in (
        ("GPU instances", "-lgi"),
        ("compute instances", "-lci"),
        ("GPU instances", "-lcip"),
        ("GPU instances", "-dgi"),
        ("compute instances", "-dci"),
    ):
        done = a30.smi("mig", listing)
        assert (done.stdout, done.returncode) == (f"No {what} found: Not Found\n", 6)
    assert a30.ok("mig", "-cgi", "14,1g.6gb,MIG 2g.12gb:2", "-C") == (
        gi_made(3, "1g.6gb", 14)
        + ci_made(0, 3, "1g.6gb", 0)
        + gi_made(4, "1g.6gb", 14)
        + ci_made(0, 4, "1g.6gb", 0)
        + gi_made(2, "2g.12gb", 5)
        + ci_made(0, 2, "2g.12gb", 1)
    )
    assert (
        a30.ok("mig", "-lgi")
        == """\
+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 2g.12gb          5        2          2:2     |
+-------------------------------------------------------+
|   0  MIG 1g.6gb          14        3          0:1     |
+-------------------------------------------------------+
|   0  MIG 1g.6gb          14        4          1:1     |
+-------------------------------------------------------+
"""
    )
    assert [line.split(":")[0] for line in a30.mig_lines()] == [
        "  MIG 2g.12gb     Device  0",
        "  MIG 1g.6gb      Device  1",
        "  MIG 1g.6gb      Device  2",
    ]
    refused = a30.smi("mig", "-dgi", "-gi", "3")
    assert (refused.stdout, refused.returncode) == (
        "Unable to destroy GPU instance ID  3 from GPU  0: In use by another client\n"
        "Failed to destroy GPU instances: In use by another client\n",
        19,
    )
    assert a30.ok("mig", "-dci", "-gi", "3", "-ci", "0", "-i", "0") == (
        "Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  3\n"
    )
    assert a30.ok("mig", "-dgi", "-gi", "3") == "Successfully destroyed GPU instance ID  3 from GPU  0\n"
    assert len(a30.mig_lines()) == 2


def test_a_gpu_instance_without_compute_instance_is_no_device(h200: Node) -> None:
    h200.ok("-mig", "1")
    h200.ok("mig", "-cgi", "3g.71gb")
    assert h200.mig_lines() == []
    profiles = re.findall(r"MIG (\S+) +(\d)(\*?) +(\d)/(\d) +(\d+) ", h200.ok("mig", "-lcip"))
    assert profiles == [
        ("1c.3g.71gb", "0", "", "3", "3", "20"),
        ("2c.3g.71gb", "1", "", "1", "1", "40"),
        ("3g.71gb", "2", "*", "1", "1", "60"),
    ]
    assert "GI  2 Profile ID  0 Placements: {0,1,2}:1" in h200.ok("mig", "-lcipp")
    assert h200.ok("mig", "-cci", "0,1c.3g.71gb", "-gi", "2") == (
        ci_made(0, 2, "1c.3g.71gb", 0) + ci_made(1, 2, "1c.3g.71gb", 0)
    )
    refused = h200.smi("mig", "-cci")
    assert (refused.returncode, refused.stdout.splitlines()[-1]) == (
        23,
        "Failed to create compute instances: Insufficient Resources",
    )
    assert h200.smi("mig", "-cci", "5").returncode == 2
    h200.ok("mig", "-dci")
    assert h200.ok("mig", "-cci") == (ci_made(0, 2, "3g.71gb", 2))
    assert re.findall(r"\| +0 +2 +MIG 3g.71gb +2 +0 +0:3", h200.ok("mig", "-lci"))


def test_a_failing_list_leaves_what_was_made(a30: Node) -> None:
    a30.ok("-mig", "1")
    done = a30.smi("mig", "-cgi", "2g.12gb,1g.6gb,2g.12gb,1g.6gb", "-C")
    assert done.returncode == 23
    assert done.stdout.splitlines()[-2:] == [
        "Unable to create a GPU instance on GPU  0 using profile 5: Insufficient Resources",
        "Failed to create GPU instances: Insufficient Resources",
    ]
    assert len(a30.mig_lines()) == 2
    done = a30.smi("mig", "-cgi", "1g.6gb,1g.5gb,1g.6gb", "-C")
    assert done.returncode == 2
    assert "using profile 1g.5gb: Invalid Argument" in done.stdout
    assert len(a30.mig_lines()) == 3


def test_insufficient_resources_can_be_armed(h200: Node) -> None:
    h200.ok("-mig", "1")
    h200.silicon("fault", "insufficient:2", "--gpu", "0")
    done = h200.smi("mig", "-cgi", "19,19,19", "-C")
    assert (done.returncode, len(h200.mig_lines())) == (23, 2)
    h200.silicon("fault", "clear")
    h200.ok("mig", "-cgi", "19", "-C")
    assert len(h200.mig_lines()) == 3


def test_the_same_instance_again_has_the_same_uuid(h200: Node) -> None:
    h200.ok("-mig", "1")
    h200.ok("mig", "-cgi", "19,19", "-C")
    before = h200.mig_lines()
    h200.ok("mig", "-dci")
    h200.ok("mig", "-dgi")
    h200.ok("mig", "-cgi", "19,19", "-C")
    assert h200.mig_lines() == before
    assert all(re.search(r"UUID: MIG-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-", line) for line in before)


def test_commands_reach_only_the_chosen_gpus(make_node: MakeNode) -> None:
    node: Node = make_node("H200,H200")
    node.ok("-mig", "1")
    node.ok("mig", "-cgi", "19", "-C")
    node.ok("mig", "-i", "1", "-cgi", "19", "-C")
    assert [len(g["instances"]) for g in node.show()["gpus"]] == [1, 2]
    node.ok("mig", "-dci", "-i", "1", "-gi", "12")
    node.ok("mig", "-dgi", "-i", "1", "-gi", "12")
    assert [len(g["instances"]) for g in node.show()["gpus"]] == [1, 1]
    node.ok("-i", "1", "-r")
    assert [len(g["instances"]) for g in node.show()["gpus"]] == [1, 0]


# ---- the driver root follows ----


def test_capability_files_follow_the_instances(make_node: MakeNode) -> None:
    node: Node = make_node("A30,H200")
    assert capabilities(node) == set()
    node.ok("-mig", "1")
    node.ok("mig", "-i", "0", "-cgi", "1g.6gb", "-C")
    node.ok("mig", "-i", "1", "-cgi", "19", "-C")
    assert capabilities(node) == {
        "gpu0/mig/gi3/access",
        "gpu0/mig/gi3/ci0/access",
        "gpu1/mig/gi11/access",
        "gpu1/mig/gi11/ci0/access",
    }
    assert (minor(node, "gpu0/mig/gi3/access"), minor(node, "gpu0/mig/gi3/ci0/access")) == (30, 31)
    assert (minor(node, "gpu1/mig/gi11/access"), minor(node, "gpu1/mig/gi11/ci0/access")) == (237, 238)
    table = dict(
        line.rsplit(" ", 1)
        for line in (node.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    )
    assert (table["gpu0/gi3/access"], table["gpu1/gi11/ci0/access"]) == ("30", "238")
    assert (table["config"], table["monitor"]) == ("1", "2")
    node.ok("mig", "-i", "0", "-dci")
    assert capabilities(node) == {"gpu0/mig/gi3/access", "gpu1/mig/gi11/access", "gpu1/mig/gi11/ci0/access"}
    node.ok("-i", "1", "-r")
    assert capabilities(node) == {"gpu0/mig/gi3/access"}


def test_left_over_capability_files_are_mended(a30: Node) -> None:
    """A process killed between these files and the state leaves too many; the next change puts it right."""
    a30.ok("-mig", "1")
    stale = a30.root / "proc/driver/nvidia/capabilities/gpu0/mig/gi6/ci0"
    stale.mkdir(parents=True)
    (stale / "access").write_text("DeviceFileMinor: 58\n")
    (stale.parent / "access").write_text("DeviceFileMinor: 57\n")
    a30.ok("mig", "-cgi", "14:0", "-C")
    assert capabilities(a30) == {"gpu0/mig/gi3/access", "gpu0/mig/gi3/ci0/access"}


def test_driver_root_has_what_the_driver_looks_for(make_node: MakeNode) -> None:
    node: Node = make_node("H200,H200")
    for name, major, number, mode in (
        ("nvidia0", 195, 0, 0o666),
        ("nvidia1", 195, 1, 0o666),
        ("nvidiactl", 195, 255, 0o666),
        ("nvidia-uvm", 510, 0, 0o666),
        ("nvidia-uvm-tools", 510, 1, 0o666),
        ("nvidia-caps/nvidia-cap1", 236, 1, 0o400),
        ("nvidia-caps/nvidia-cap2", 236, 2, 0o444),
    ):
        info = (node.root / "dev" / name).stat()
        assert stat.S_ISCHR(info.st_mode)
        assert (os.major(info.st_rdev), os.minor(info.st_rdev)) == (major, number)
        assert stat.S_IMODE(info.st_mode) == mode
    libraries = node.root / "usr/lib/x86_64-linux-gnu"
    assert (libraries / "libnvidia-ml.so.1").readlink() == Path("libnvidia-ml.so.580.95.05")
    for program in ("nvidia-smi", "lab-silicon"):
        assert not (node.root / "usr/bin" / program).is_symlink()
        assert os.access(node.root / "usr/bin" / program, os.X_OK)
    devices = (node.root / "proc/devices").read_text()
    assert re.search(
        r"^Character devices:\n(?:.+\n)*236 nvidia-caps\n(?:.+\n)*\nBlock devices:\n", devices, re.M
    )
    information = (node.root / "proc/driver/nvidia/gpus/0000:00:07.0/information").read_text()
    assert "Device Minor: \t 1\n" in information
    assert "emulated silicon" in (node.root / "proc/driver/nvidia/version").read_text()


# ---- reboot and reset ----


@pytest.mark.parametrize(
    ("card", "kept"), [("A30", True), ("A100-80", True), ("H100", False), ("H200", False)]
)
def test_reboot(make_node: MakeNode, card: str, kept: bool) -> None:
    node: Node = make_node(card)
    node.ok("-mig", "1")
    node.ok("mig", "-cgi", "0", "-C")
    node.silicon("init", "--cards", card, "--boot-id", "boot-1")
    assert len(node.mig_lines()) == 1  # the same boot: nothing happens
    node.silicon("init", "--cards", card, "--boot-id", "boot-2")
    assert node.mig_lines() == []
    assert capabilities(node) == set()
    assert node.mode() == (("Enabled", "Enabled") if kept else ("Disabled", "Disabled"))


def test_a_pending_change_takes_effect_at_reboot_on_ampere(a30: Node) -> None:
    child = monitor(a30)
    a30.ok("-mig", "1")
    child.kill()
    child.wait()
    a30.silicon("reboot")
    assert a30.mode() == ("Enabled", "Enabled")


def test_init_keeps_what_is_there_and_begins_anew_with_other_cards(a30: Node) -> None:
    inode, lines = a30.state.stat().st_ino, a30.ok("-L")
    generation = a30.show()["generation"]
    a30.init("A30")
    assert (a30.state.stat().st_ino, a30.ok("-L"), a30.show()["generation"]) == (inode, lines, generation)
    a30.init("H200")
    assert "NVIDIA H200" in a30.ok("-L")
    assert a30.state.stat().st_ino == inode


def test_a_boot_is_told_by_the_first_process(make_node: MakeNode) -> None:
    """Without --boot-id: the same container start is the same boot."""
    node: Node = make_node("A30")
    node.silicon("init", "--cards", "A30")
    node.ok("-mig", "1")
    node.ok("mig", "-cgi", "14", "-C")
    node.silicon("init", "--cards", "A30")
    assert len(node.mig_lines()) == 1


# ---- faults and settings ----


def test_a_lost_gpu(make_node: MakeNode) -> None:
    node: Node = make_node("A30,A30")
    node.silicon("fault", "lost", "--gpu", "1")
    done = node.smi("-L")
    assert done.returncode == 15
    assert "Unable to determine the device handle for GPU1: 0000:00:07.0: GPU is lost." in done.stdout
    assert node.ok("-i", "0", "--query-gpu=index", "--format=csv,noheader") == "0\n"
    assert (
        node.python("""
import pynvml as n
n.nvmlInit()
n.nvmlDeviceGetHandleByIndex(0)
try:
    n.nvmlDeviceGetHandleByIndex(1)
except n.NVMLError_GpuIsLost as e:
    print(e)
""")
        == "GPU is lost\n"
    )
    node.silicon("reboot")
    assert len(node.ok("-L").splitlines()) == 2


def test_busy_and_slow(h200: Node) -> None:
    h200.silicon("fault", "busy", "--gpu", "0")
    assert "In use by another client" in h200.ok("-mig", "1")
    h200.silicon("fault", "clear", "--gpu", "0")
    h200.silicon("fault", "slow:300", "--gpu", "0")
    started = time.monotonic()
    h200.ok("-mig", "1")
    assert time.monotonic() - started >= 0.3
    assert h200.show()["gpus"][0]["faults"] == "slow:300"
    h200.silicon("fault", "clear", "busy", "insufficient:2")
    assert h200.show()["gpus"][0]["faults"] == "busy insufficient:2"
    assert h200.silicon("fault", "clear", "nonsense", check=False).returncode == 2
    assert h200.show()["gpus"][0]["faults"] == "busy insufficient:2"


@pytest.mark.parametrize(
    "wrong",
    [
        ["fault", "nonsense"],
        ["fault"],
        ["fault", "slow:x"],
        ["fault", "xid"],
        ["fault", "busy", "--gpu", "9"],
        ["hold"],
        ["nothing"],
        [],
    ],
)
def test_lab_silicon_refuses_what_it_does_not_know(a30: Node, wrong: list[str]) -> None:
    before = a30.show()
    done = a30.silicon(*wrong, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("lab-silicon: ")
    assert a30.show() == before


def test_persistence_compute_mode_and_timeslice(a30: Node) -> None:
    uuid = a30.ok("--query-gpu=uuid", "--format=csv,noheader").strip()
    query = ("--query-gpu=persistence_mode,compute_mode", "--format=csv,noheader")
    assert a30.ok(*query) == "Enabled, Default\n"
    assert a30.ok("-pm", "0") == f"Disabled persistence mode for GPU {BUS}.\nAll done.\n"
    assert a30.ok("-i", uuid, "-c", "EXCLUSIVE_PROCESS") == (
        f"Set compute mode to EXCLUSIVE_PROCESS for GPU {BUS}.\nAll done.\n"
    )
    assert a30.ok(*query) == "Disabled, Exclusive_Process\n"
    assert "E. Process" in a30.ok()
    a30.ok("-i", uuid, "-c", "DEFAULT")
    real = (FIXTURES / "nvidia-smi" / "h200-580-compute-policy.txt").read_text()
    assert a30.ok("compute-policy", "--list") == real
    assert a30.ok("compute-policy", "-i", uuid, "--set-timeslice", "3") == (
        f"Successfully set timeslice policy to Long for GPU {BUS}\n"
    )
    assert "Long" in a30.ok("compute-policy", "-l")
    assert a30.smi("compute-policy", "--set-timeslice", "7").returncode == 2
    assert a30.smi("-c", "SOMETIMES").returncode == 2
