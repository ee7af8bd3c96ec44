"""The parsers against captures of a real H200 (tests/fixtures/nvidia-smi) and texts of other drivers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu_slices.nvidia_smi import (
    ComputeApp,
    ComputeInstanceRow,
    GpuInstanceRow,
    GpuLine,
    MigLine,
    NvidiaSmi,
    NvidiaSmiError,
    PlacementRow,
    ProfileRow,
    UnreadableOutput,
    known_failure,
    parse_compute_apps,
    parse_compute_instances,
    parse_details,
    parse_gpu_instances,
    parse_gpus,
    parse_instance_change,
    parse_list,
    parse_mode_change,
    parse_placements,
    parse_profiles,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nvidia-smi"


def captured(command: str, file: str = "h200-580.txt") -> tuple[str, int]:
    """Output and exit status of one command of a capture file."""
    text = (FIXTURES / file).read_text()
    found = re.search(
        rf"^\$ {re.escape(command)}\n(.*?)^(?:--rc=|\[rc )(\d+)\]?$", text, re.DOTALL | re.MULTILINE
    )
    assert found, f"{command} is not in {file}"
    return found.group(1), int(found.group(2))


# -- captures of the real card


def test_list_of_the_real_card():
    text, _rc = captured("nvidia-smi -L")
    assert parse_list(text) == [GpuLine(0, "NVIDIA H200", "GPU-11111111-2222-3333-4444-555555555555")]


@pytest.mark.parametrize("command", ["nvidia-smi mig -lgip", "nvidia-smi mig -i 0 -lgip"])
def test_profiles_of_the_real_card(command):
    text, _rc = captured(command)
    assert parse_profiles(text) == [
        ProfileRow(0, "1g.18gb", 19, 7, 7, 16.0, 16),
        ProfileRow(0, "1g.18gb+me", 20, 1, 1, 16.0, 16),
        ProfileRow(0, "1g.35gb", 15, 4, 4, 32.5, 26),
        ProfileRow(0, "2g.35gb", 14, 3, 3, 32.5, 32),
        ProfileRow(0, "3g.71gb", 9, 2, 2, 69.75, 60),
        ProfileRow(0, "4g.71gb", 5, 1, 1, 69.75, 64),
        ProfileRow(0, "7g.141gb", 0, 1, 1, 140.0, 132),
    ]


def test_placements_of_the_real_card():
    text, _rc = captured("nvidia-smi mig -lgipp")
    rows = parse_placements(text)
    assert rows[0] == PlacementRow(0, 19, (0, 1, 2, 3, 4, 5, 6), 1)
    assert rows[-2:] == [PlacementRow(0, 5, (0,), 4), PlacementRow(0, 0, (0,), 8)]
    assert len(rows) == 7


@pytest.mark.parametrize(
    ("option", "parser"), [("-lgi", parse_gpu_instances), ("-lci", parse_compute_instances)]
)
def test_nothing_is_listed_while_mig_is_off(option, parser):
    text, rc = captured(f"nvidia-smi mig {option}")
    assert (parser(text), rc) == ([], 0)


def test_processes_of_the_real_card():
    command = "nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv"
    text, _rc = captured(command, "h200-580-busy.txt")
    without_header = text.split("\n", 1)[1]
    assert parse_compute_apps(without_header) == [
        ComputeApp("GPU-00000000-1111-2222-3333-444444444444", 441, "python3", 1634)
    ]


def test_no_process_on_the_idle_card():
    text, _rc = captured(
        "nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader"
    )
    assert parse_compute_apps(text) == []


def test_details_of_the_real_card():
    (gpu,) = parse_details((FIXTURES / "h200-580-q.xml").read_text())
    assert (gpu.minor, gpu.architecture, gpu.processes) == (0, "Hopper", ())
    assert gpu.uuid == "GPU-00000000-1111-2222-3333-444444444444"


def test_the_real_failures_are_known():
    missing, rc = captured("nvidia-smi mig -i 99 -lgip")
    assert rc == 6
    assert known_failure("nvidia-smi mig -i 99 -lgip", missing).kind == "no_devices"
    field, rc = captured("nvidia-smi --query-gpu=index,nosuchfield --format=csv")
    assert rc == 2
    assert known_failure("nvidia-smi --query-gpu", field).kind == "old_driver"


# -- other drivers and states

LISTED = """\
GPU 0: NVIDIA A30 (UUID: GPU-aaaaaaaa-0000-0000-0000-000000000000)
  MIG 2g.12gb     Device  0: (UUID: MIG-11111111-0000-5000-8000-000000000000)
  MIG 1g.6gb+me   Device  1: (UUID: MIG-22222222-0000-5000-8000-000000000000)
GPU 1: NVIDIA A30 (UUID: GPU-bbbbbbbb-0000-0000-0000-000000000000)
"""


def test_list_with_mig_devices():
    first, second = parse_list(LISTED)
    assert first.mig == (
        MigLine("2g.12gb", 0, "MIG-11111111-0000-5000-8000-000000000000"),
        MigLine("1g.6gb+me", 1, "MIG-22222222-0000-5000-8000-000000000000"),
    )
    assert second.mig == ()


def test_list_with_the_uuid_form_of_old_drivers():
    text = (
        LISTED.splitlines()[0]
        + "\n  MIG 1g.6gb Device 0: (UUID: MIG-GPU-aaaaaaaa-0000-0000-0000-000000000000/3/0)\n"
    )
    assert parse_list(text)[0].mig[0].uuid == "MIG-GPU-aaaaaaaa-0000-0000-0000-000000000000/3/0"


ROW = "0, GPU-aa, NVIDIA A30, 00000000:07:00.0, 0x20B710DE, {memory}, {current}, {pending}, 535.1\n"


@pytest.mark.parametrize("memory", ["24576", "24576 MiB"])
def test_gpu_row(memory):
    (gpu,) = parse_gpus(ROW.format(memory=memory, current="Disabled", pending="Enabled"))
    assert (gpu.memory_mib, gpu.mig_mode_current, gpu.mig_mode_pending) == (24576, "Disabled", "Enabled")
    assert gpu.pci_device_id == "0x20B710DE"


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "N/A"])
def test_a_card_without_mig_is_neither_on_nor_off(word):
    (gpu,) = parse_gpus(ROW.format(memory=1, current=word, pending=word))
    assert gpu.mig_mode_current == gpu.mig_mode_pending == "N/A"


NARROW_PROFILES = """\
+-----------------------------------------------------------------------------+
| GPU instance profiles:                                                      |
| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |
|                              Free/Total   GiB              CE    JPEG  OFA  |
|=============================================================================|
|   0  MIG 1g.6gb        14     4/4        5.81       No     14     1     0   |
|                                                             1     0     0   |
+-----------------------------------------------------------------------------+
|   1  MIG 1g.6gb+me     21     0/1        5.81       No     14     1     0   |
|                                                             1     1     1   |
+-----------------------------------------------------------------------------+
"""


def test_profiles_of_the_narrow_table():
    assert parse_profiles(NARROW_PROFILES) == [
        ProfileRow(0, "1g.6gb", 14, 4, 4, 5.81, 14),
        ProfileRow(1, "1g.6gb+me", 21, 0, 1, 5.81, 14),
    ]


INSTANCES = """\
+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 1g.6gb          14        3          0:1     |
+-------------------------------------------------------+
|   1  MIG 2g.12gb          5       11          2:2     |
+-------------------------------------------------------+
"""
COMPUTE = """\
+--------------------------------------------------------------------+
| Compute instances:                                                 |
| GPU     GPU       Name             Profile   Instance   Placement  |
|       Instance                       ID        ID       Start:Size |
|         ID                                                         |
|====================================================================|
|   0      3       MIG 1g.6gb           0         0          0:1     |
+--------------------------------------------------------------------+
|   1     11       MIG 1c.2g.12gb       0         1          1:1     |
+--------------------------------------------------------------------+
"""


def test_instances():
    assert parse_gpu_instances(INSTANCES) == [
        GpuInstanceRow(0, 3, "1g.6gb", 14, 0, 1),
        GpuInstanceRow(1, 11, "2g.12gb", 5, 2, 2),
    ]
    assert parse_compute_instances(COMPUTE) == [
        ComputeInstanceRow(0, 3, 0, "1g.6gb", 0, 0, 1),
        ComputeInstanceRow(1, 11, 1, "1c.2g.12gb", 0, 1, 1),
    ]


def test_a_process_name_may_hold_commas_and_unknown_memory():
    text = "GPU-aa, 7, python3, -m, train, 12 MiB\nGPU-aa, 8, [Not Found], [N/A]\n"
    assert parse_compute_apps(text) == [
        ComputeApp("GPU-aa", 7, "python3, -m, train", 12),
        ComputeApp("GPU-aa", 8, "[Not Found]", None),
    ]


def test_a_process_inside_an_instance():
    xml = (FIXTURES / "h200-580-q.xml").read_text()
    process = (
        "<process_info><gpu_instance_id>3</gpu_instance_id><compute_instance_id>0</compute_instance_id>"
        "<pid>99</pid><type>C</type><process_name>python3</process_name></process_info>"
    )
    (gpu,) = parse_details(re.sub(r"(<processes>)\s*(</processes>)", rf"\1{process}\2", xml))
    assert [(item.pid, item.name, item.gi_id) for item in gpu.processes] == [(99, "python3", 3)]


def test_mode_change_done_and_pending():
    done = parse_mode_change("Enabled MIG Mode for GPU 00000000:36:00.0\nAll done.\n")
    assert (done.changed, done.pending, done.notes) == ({"00000000:36:00.0": "Enabled"}, {}, [])
    held = parse_mode_change(
        "Warning: MIG mode is in pending enable state for GPU 00000000:07:00.0:In use by another client\n"
        "00000000:07:00.0 is currently being used by one or more other processes (e.g. CUDA application).\n"
        "All done.\n"
    )
    assert held.changed == {}
    assert held.pending == {"00000000:07:00.0": "In use by another client"}
    assert "is currently being used" in held.notes[0]


def test_a_creation_that_stops_half_way():
    report = parse_instance_change(
        "Successfully created GPU instance ID 11 on GPU  0 using profile MIG 1g.10gb (ID 19)\n"
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID 11"
        " using profile MIG 1g.10gb (ID  0)\n"
        "Unable to create a GPU instance on GPU  0 using profile 5: Insufficient Resources\n"
        "Failed to create GPU instances: Insufficient Resources\n"
    )
    assert report.gpu_instances == [(0, 11)]
    assert report.compute_instances == [(0, 11, 0)]
    assert report.errors[-1] == "Failed to create GPU instances: Insufficient Resources"


def test_a_destruction_in_use():
    report = parse_instance_change(
        "Successfully destroyed GPU instance ID  1 from GPU  0\n"
        "Unable to destroy GPU instance ID  3 from GPU  0: In use by another client\n"
        "Failed to destroy GPU instances: In use by another client\n"
    )
    assert report.gpu_instances == [(0, 1)]
    assert len(report.errors) == 2


# -- what cannot be read names the command and the line


@pytest.mark.parametrize(
    ("parser", "text", "command", "line"),
    [
        (parse_list, "GPU zero: card\n", "nvidia-smi -L", "GPU zero: card"),
        (parse_list, "  MIG 1g.6gb Device 0: (UUID: MIG-1)\n", "nvidia-smi -L", "  MIG 1g.6gb"),
        (parse_gpus, "0, GPU-aa, card\n", "--query-gpu", "0, GPU-aa, card"),
        (
            parse_gpus,
            ROW.format(memory="[N/A]", current="Enabled", pending="Enabled"),
            "--query-gpu",
            "[N/A]",
        ),
        (parse_gpus, ROW.format(memory=1, current="Maybe", pending="Enabled"), "--query-gpu", "Maybe"),
        (parse_profiles, NARROW_PROFILES.replace("4/4", "four"), "mig -lgip", "four"),
        (parse_profiles, "Segmentation fault\n", "mig -lgip", "Segmentation fault"),
        (parse_placements, "GPU 0 Profile 19: {0}\n", "mig -lgipp", "GPU 0 Profile 19"),
        (parse_gpu_instances, INSTANCES.replace("0:1", "0-1"), "mig -lgi", "0-1"),
        (parse_compute_instances, COMPUTE.replace("1:1 ", "1   "), "mig -lci", "1c.2g.12gb"),
        (parse_compute_apps, "GPU-aa, python3\n", "--query-compute-apps", "GPU-aa, python3"),
        (parse_details, "not XML\n", "-q -x", "not XML"),
    ],
)
def test_unreadable_text_names_the_command_and_the_line(parser, text, command, line):
    with pytest.raises(UnreadableOutput) as caught:
        parser(text)
    assert command in caught.value.command
    assert line in caught.value.line
    assert command in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n",
            "driver_mismatch",
        ),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the"
            " latest NVIDIA driver is installed and running.\n",
            "driver_not_loaded",
        ),
        (
            "Unable to determine the device handle for GPU0000:C1:00.0: GPU is lost.  Reboot the system to"
            " recover this GPU\n",
            "gpu_lost",
        ),
        ("Unable to determine the device handle for GPU0: 0000:3B:00.0: Unknown Error\n", "gpu_unreachable"),
        ("Failed to initialize NVML: Unknown Error\n", "nvml"),
        ("No devices were found\n", "no_devices"),
        ("Unable to enable MIG Mode for GPU 00000000:36:00.0: Insufficient Permissions\n", "permission"),
    ],
)
def test_known_failures_say_what_to_do(text, kind):
    error = known_failure("nvidia-smi -L", text)
    assert error.kind == kind
    assert error.fix
    assert text.splitlines()[0].strip() in str(error)


def test_a_clean_text_is_no_failure():
    assert known_failure("nvidia-smi -L", LISTED) is None


# -- the command layer


def test_an_unknown_failure_carries_status_and_text():
    smi = NvidiaSmi(lambda _args: (255, "Something new\n"))
    with pytest.raises(NvidiaSmiError, match=r"nvidia-smi -L.*exit status 255: Something new"):
        smi.listing()


def test_an_empty_list_with_status_6_is_no_failure():
    smi = NvidiaSmi(lambda _args: (6, "No GPU instances found: Not Found\n"))
    assert smi.gpu_instances() == []


def test_a_change_that_fails_without_a_word_still_is_an_error():
    smi = NvidiaSmi(lambda _args: (19, ""))
    assert smi.destroy(0, [1]).errors == [
        "`nvidia-smi mig -i 0 -gi 1 -dgi` ended with exit status 19: no output"
    ]


def test_commands_as_nvidia_smi_wants_them():
    seen: list[list[str]] = []

    def run(args):
        seen.append(list(args))
        return 0, ""

    smi = NvidiaSmi(run)
    smi.create(1, [(9, 4), (19, 0)])
    smi.create_compute(1, [3])
    smi.destroy_compute(1, [3, 4])
    smi.destroy(1, [3, 4])
    smi.set_mode(1, enabled=True)
    smi.reset(1)
    assert [" ".join(args) for args in seen] == [
        "mig -i 1 -cgi 9:4,19:0 -C",
        "mig -i 1 -gi 3 -cci",
        "mig -i 1 -gi 3,4 -dci",
        "mig -i 1 -gi 3,4 -dgi",
        "-i 1 -mig 1",
        "-i 1 --gpu-reset",
    ]
