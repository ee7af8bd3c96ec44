"""The mig_layout module as a process of its own that talks to a fake nvidia-smi, and the parts below it.

The fake is a program where the way to it is the subject; elsewhere it is called within the process, which is
faster.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path

import ansible.module_utils
import pytest
from ansible.errors import AnsibleFilterError
from ansible.module_utils import basic
from fake_nvidia_smi import FakeNvidiaSmi, new_gpu
from gpu_slices import gpu_holders
from gpu_slices.gpu_holders import Holder, find_holders, library_users, pod_of
from gpu_slices.mig_layout import Want
from gpu_slices.mig_node import (
    ChangeError,
    RecordError,
    add_to_record,
    apply_plan,
    blockers,
    drop_from_record,
    locked,
    plan_node,
    read_gpus,
    read_record,
    runner,
)
from gpu_slices.nvidia_smi import NvidiaSmi, NvidiaSmiError

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_nvidia_smi.py")
UTILS = str(ROOT / "plugins/module_utils")

A30, A100, H200, T4 = "NVIDIA A30", "NVIDIA A100-SXM4-40GB", "NVIDIA H200", "Tesla T4"


def layout(*pairs, devices="all", enabled=True, **more):
    entry = {"devices": devices, "mig-enabled": enabled, **more}
    return {**entry, "mig-devices": dict(pairs)} if enabled else entry


FOUR = [layout(("1g.6gb", 4))]
TWO = [layout(("2g.12gb", 2))]


class Node:
    """A node with GPUs: runs the module as Ansible would, and shows or edits what its nvidia-smi sees."""

    def __init__(self, folder: Path, *gpus: dict, **state):
        self.folder = folder
        self.file = folder / "gpus.json"
        self.save({"gpus": list(gpus), **state})
        self.program = folder / "nvidia-smi"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {FAKE} "$@"\n')
        self.program.chmod(0o755)
        self.record = folder / "record" / "mig-layout.json"

    def load(self):
        return json.loads(self.file.read_text())

    def save(self, state):
        self.file.write_text(json.dumps(state))

    def edit(self, gpu=0, **keys):
        state = self.load()
        state["gpus"][gpu].update(keys)
        self.save(state)

    def log(self):
        return [" ".join(args) for args in self.load().get("log", [])]

    def cut(self, gpu=0):
        return sorted((item["name"], item["start"]) for item in self.load()["gpus"][gpu]["instances"])

    def mode(self, gpu=0):
        state = self.load()["gpus"][gpu]
        return state["mode"], state["pending"]

    def run(self, check=False, as_program=False, **args):
        args = {"nvidia_smi": str(self.program), "record_dir": str(self.folder / "record"), **args}
        ansible_args = {"_ansible_check_mode": check, "_ansible_diff": True}
        returncode, output = run_module({**args, **ansible_args}, self.file, as_program)
        assert "Traceback" not in output
        result = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        assert bool(result.get("failed")) == (returncode != 0)
        # warnings are part of the result or lines beside it, depending on the Ansible release
        return {**result, "printed": output}


def run_module(args, state, as_program):
    """Run the module in a forked process, as Ansible would start it; returns exit status and output."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            # arguments and module_utils as Ansible's wrapper hands them over
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ["FAKE_NVIDIA_SMI"] = str(state)
            ansible.module_utils.__path__.append(UTILS)
            basic._ANSIBLE_ARGS = json.dumps({"ANSIBLE_MODULE_ARGS": args}).encode()
            basic._ANSIBLE_PROFILE = "legacy"
            code = 99
            try:
                # the fake's GPUs are not those that processes of this machine may hold
                holders = importlib.import_module("ansible.module_utils.gpu_slices.gpu_holders")
                holders._pids = lambda _proc: iter(())
                if not as_program:
                    importlib.import_module("ansible.module_utils.gpu_slices.mig_node").runner = within(state)
                runpy.run_path(str(ROOT / "plugins/modules/mig_layout.py"), run_name="__main__")
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _pid, status = os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode()


def within(file):
    """A stand-in for ``runner`` that calls the fake without starting a program."""

    def run(args):
        state = json.loads(file.read_text())
        smi = FakeNvidiaSmi(state["gpus"], state.get("width", 81))
        smi.whole_error = state.get("whole_error")
        result = smi.run(args)
        file.write_text(json.dumps({**state, "log": state.get("log", []) + smi.log}))
        return result

    return lambda _program, _timeout: run


@pytest.fixture
def no_real_processes(monkeypatch):
    monkeypatch.setattr(gpu_holders, "_pids", lambda _proc: iter(()))


@pytest.fixture
def node(tmp_path):
    return lambda *gpus, **state: Node(tmp_path, *gpus, **state)


# -- the way it should go


@pytest.mark.parametrize("width", [79, 81])
@pytest.mark.parametrize(
    ("product", "config", "cut"),
    [
        (A30, FOUR, [("1g.6gb", 0), ("1g.6gb", 1), ("1g.6gb", 2), ("1g.6gb", 3)]),
        (A100, [layout(("1g.5gb", 4), ("3g.20gb", 1))], [*[("1g.5gb", i) for i in range(4)], ("3g.20gb", 4)]),
        (H200, [layout(("3g.71gb", 2))], [("3g.71gb", 0), ("3g.71gb", 4)]),
    ],
)
def test_a_fresh_gpu_is_cut_once(node, product, config, cut, width):
    node = node(new_gpu(0, product), width=width)
    first = node.run(config=config, as_program=True)
    assert first["changed"]
    assert node.cut() == cut
    assert node.mode() == ("Enabled", "Enabled")
    devices = first["gpus"][0]["mig_devices"]
    assert [
        (item["profile"], item["placement_start"])
        for item in sorted(devices, key=lambda d: d["placement_start"])
    ] == (sorted(cut, key=lambda item: item[1]))
    assert len({item["uuid"] for item in devices}) == len(cut)
    assert json.loads(node.record.read_text())["gpus"][0]["mig_enabled"] is False
    commands = node.log()
    second = node.run(config=config, as_program=True)
    assert not second["changed"]
    assert second["gpus"] == first["gpus"]
    assert node.log() == commands


def test_ampere_is_reset_and_hopper_is_not(node):
    node = node(new_gpu(0, A30), new_gpu(1, H200))
    node.run(config=[layout(("1g.6gb", 1), devices=[0]), layout(("1g.18gb", 1), devices=[1])])
    assert "-i 0 --gpu-reset" in node.log()
    assert "-i 1 --gpu-reset" not in node.log()


def test_check_mode_shows_the_plan_and_touches_nothing(node):
    node = node(new_gpu(0, A30))
    before = node.file.read_text()
    result = node.run(check=True, config=FOUR)
    assert result["changed"]
    assert json.loads(node.file.read_text()) == {**json.loads(before), "log": []}
    assert not node.record.exists()
    (diff,) = result["diff"]
    assert "MIG Disabled" in diff["before"]
    assert diff["after"].count("1g.6gb at") == 4
    assert result["plan"][0]["steps"][0] == "GPU 0: enable MIG mode"


def test_a_new_layout_keeps_what_fits(node):
    node = node(new_gpu(0, A30))
    kept = {item["uuid"] for item in node.run(config=FOUR)["gpus"][0]["mig_devices"][:2]}
    result = node.run(config=[layout(("1g.6gb", 2), ("2g.12gb", 1))])
    assert kept < {item["uuid"] for item in result["gpus"][0]["mig_devices"]}
    assert [len(result["plan"][0][key]) for key in ("keep", "destroy", "create")] == [2, 2, 1]


def test_only_the_gpus_of_the_layout_are_touched(node):
    node = node(new_gpu(0, H200), new_gpu(1, H200))
    result = node.run(config=[layout(("1g.18gb", 7), devices=[1])])
    assert node.cut(0) == []
    assert len(node.cut(1)) == 7
    assert [plan["index"] for plan in result["plan"]] == [1]


@pytest.mark.parametrize("args", [{}, {"state": "gathered", "config": FOUR}])
def test_without_a_layout_the_gpus_are_only_read(node, args):
    node = node(new_gpu(0, A30), new_gpu(1, T4))
    result = node.run(**args)
    assert not result["changed"]
    assert [gpu["mig_mode_current"] for gpu in result["gpus"]] == ["Disabled", "N/A"]
    assert result["gpus"][0]["memory_mib"] == 24576
    assert node.log() == []


def test_an_instance_without_compute_instance_is_mended(node):
    node = node(new_gpu(0, A30))
    node.run(config=FOUR)
    state = node.load()
    state["gpus"][0]["instances"][2]["cis"] = []
    node.save({**state, "log": []})
    assert node.run(config=FOUR)["changed"]
    assert node.log() == ["mig -i 0 -gi 9 -cci"]
    assert not node.run(config=FOUR)["changed"]


# -- back to the first state


def test_the_first_layout_comes_back_and_the_record_goes(node):
    node = node(new_gpu(0, A30))
    node.run(config=TWO)
    node.record.unlink()  # as if the two slices had been there before this project came
    node.run(config=FOUR)
    node.run(config=[layout(("4g.24gb", 1))])
    assert [item["profile"] for item in json.loads(node.record.read_text())["gpus"][0]["instances"]] == [
        "2g.12gb"
    ] * 2
    preview = node.run(check=True, state="restored")
    assert preview["changed"]
    assert node.cut() == [("4g.24gb", 0)]
    assert node.run(state="restored")["changed"]
    assert node.cut() == [("2g.12gb", 0), ("2g.12gb", 2)]
    assert not node.record.exists()
    assert not node.run(state="restored")["changed"]


def test_mig_mode_goes_back_too(node):
    node = node(new_gpu(0, H200), new_gpu(1, H200))
    node.run(config=[layout(("1g.18gb", 7))])
    node.run(state="restored")
    assert [node.mode(gpu) for gpu in (0, 1)] == [("Disabled", "Disabled")] * 2


def test_a_recorded_gpu_that_is_gone_is_a_warning(node, tmp_path):
    node = node(new_gpu(0, H200), new_gpu(1, H200))
    node.run(config=[layout(("1g.18gb", 1))])
    state = node.load()
    node.save({**state, "gpus": state["gpus"][:1]})
    result = node.run(state="restored")
    assert (
        "The recorded GPU GPU-00000001-1111-2222-3333-444444444444 is not in this node" in result["printed"]
    )
    assert node.cut(0) == []


def test_a_gpu_is_recorded_once_and_only_when_it_changes(tmp_path):
    fake = FakeNvidiaSmi([new_gpu(0, A30), new_gpu(1, A30)])
    smi = NvidiaSmi(fake.run)
    first, second = read_gpus(smi)
    assert add_to_record(str(tmp_path), [first]) == [first.uuid]
    written = (tmp_path / "mig-layout.json").read_text()
    fake.gpus[0]["mode"] = fake.gpus[0]["pending"] = "Enabled"
    assert add_to_record(str(tmp_path), read_gpus(smi)[:1]) == []
    assert (tmp_path / "mig-layout.json").read_text() == written
    assert add_to_record(str(tmp_path), read_gpus(smi)) == [second.uuid]
    assert {uuid: want.enabled for uuid, want in read_record(str(tmp_path)).items()} == {
        first.uuid: False,
        second.uuid: False,
    }
    drop_from_record(str(tmp_path), [second.uuid])
    assert list(read_record(str(tmp_path))) == [first.uuid]
    drop_from_record(str(tmp_path), [first.uuid])
    assert list(tmp_path.iterdir()) == []
    assert read_record(str(tmp_path)) is None


def test_a_gpu_that_was_left_alone_is_not_restored(node):
    node = node(new_gpu(0, H200), new_gpu(1, H200))
    node.run(config=[layout(("1g.18gb", 7), devices=[0])])
    node.edit(gpu=1, mode="Enabled", pending="Enabled")  # an admin's own doing
    node.run(state="restored")
    assert [node.mode(gpu)[0] for gpu in (0, 1)] == ["Disabled", "Enabled"]


def test_one_run_at_a_time_changes_a_node(node):
    node = node(new_gpu(0, A30))
    folder = str(node.record.parent)
    with locked(folder, 1):
        refused(node, "another run has been changing this node's GPUs", config=FOUR, timeout=0)
        assert not node.run(config=[layout(enabled=False)])["changed"]
    assert node.run(config=FOUR)["changed"]


@pytest.mark.parametrize("text", ["", "[]", '{"gpus": [{}]}', "not json"])
def test_a_broken_record_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "mig-layout.json").write_text(text)
    with pytest.raises(RecordError, match=r"mig-layout\.json cannot be read"):
        read_record(str(tmp_path))


# -- refusals: nothing may have been touched


def refused(node, *parts, **args):
    """Run, expect a failure whose text has all ``parts``, and an untouched node."""
    before = node.load()["gpus"]
    result = node.run(**args)
    assert result["failed"]
    assert not result["changed"]
    for part in parts:
        assert part in result["msg"]
    assert node.load()["gpus"] == before
    return result


def test_a_wrong_layout_is_refused_with_every_fault(node):
    node = node(new_gpu(0, A30), new_gpu(1, H200))
    refused(
        node,
        "GPU 0: NVIDIA A30 has no profile 1g.18gb",
        "Nearest: 1g.6gb",
        "GPU 1: NVIDIA H200 holds at most 7 x 1g.18gb, 8 are asked for",
        config=[layout(("1g.18gb", 8))],
    )
    refused(
        node,
        "'two' is not a MIG profile name",
        "lacks the key mig-enabled",
        config=[{"devices": "all"}, layout(("two", 1))],
    )
    refused(node, "there is no GPU 4; GPUs here: 0, 1", config=[layout(("1g.6gb", 1), devices=[4])])
    assert node.log() == []


def test_a_gpu_in_use_keeps_its_mode(node):
    node = node(new_gpu(0, A30, processes=[[4194300, "python3", None]]))
    refused(
        node,
        "Nothing was changed",
        "GPU 0 (NVIDIA A30) is in use, so this run will not switch MIG on",
        "process 4194300 (python3)",
        "Stop these processes",
        config=FOUR,
    )
    assert node.log() == []
    assert not node.record.exists()
    preview = node.run(check=True, config=FOUR)
    assert "This change would be refused: GPU 0 (NVIDIA A30) is in use" in preview["printed"]


def test_an_instance_in_use_is_not_destroyed_but_its_neighbours_may_be(node):
    node = node(new_gpu(0, A30))
    node.run(config=FOUR)
    node.edit(processes=[[4194300, "train.py", 8]])
    refused(node, "will not destroy GPU instance", "process 4194300 (train.py) in GPU instance 8", config=TWO)
    result = node.run(config=[layout(("1g.6gb", 2), ("2g.12gb", 1))])
    assert result["changed"]
    assert 8 in {item["gi_id"] for item in result["gpus"][0]["mig_devices"]}


HOLDER = "claim train/c, pod train/p"


def test_a_claimed_instance_is_kept_though_no_process_uses_it(node):
    node = node(new_gpu(0, A30))
    device = node.run(config=FOUR)["gpus"][0]["mig_devices"][2]
    claimed = [{"uuid": device["uuid"], "holder": HOLDER}]
    gi_id = device["gi_id"]
    commands = node.log()
    result = refused(
        node,
        "Nothing was changed",
        "GPU 0 (NVIDIA A30) is in use, so this run will not destroy GPU instance",
        f"{HOLDER}, holds {device['uuid']} (GPU instance {gi_id}). Delete the pod that has the claim",
        "wait until it has ended, then run again",
        config=TWO,
        claimed=claimed,
    )
    assert "process" not in result["msg"]
    refused(node, "will not switch MIG off", HOLDER, config=[layout(enabled=False)], claimed=claimed)
    refused(node, "will not switch MIG off", HOLDER, state="restored", claimed=claimed)
    assert node.record.exists()
    preview = node.run(check=True, config=TWO, claimed=claimed)
    assert "This change would be refused: GPU 0 (NVIDIA A30) is in use" in preview["printed"]
    assert HOLDER in preview["printed"]
    assert node.log() == commands

    assert not node.run(config=FOUR, claimed=claimed)["changed"]
    # of four alike, the two that go are others
    around = node.run(config=[layout(("1g.6gb", 1), ("2g.12gb", 1))], claimed=claimed)
    assert around["changed"]
    assert device["uuid"] in {item["uuid"] for item in around["gpus"][0]["mig_devices"]}
    assert node.run(config=TWO)["changed"]  # once it is given back


def test_a_claimed_gpu_keeps_its_mode_and_the_other_may_change(node):
    node = node(new_gpu(0, A30), new_gpu(1, A30))
    first, second = (gpu["uuid"] for gpu in node.run()["gpus"])
    claimed = [{"uuid": second, "holder": HOLDER}]
    refused(node, "GPU 1 (NVIDIA A30)", f"{HOLDER}, holds this GPU", config=FOUR, claimed=claimed)
    assert node.log() == []
    assert not node.record.exists()
    assert node.run(config=[layout(("1g.6gb", 4), devices=[0])], claimed=claimed)["changed"]
    assert first != second


def test_a_claim_on_an_unknown_device_of_the_node_protects_all_but_adding(node):
    node = node(new_gpu(0, A30))
    node.run(config=[layout(("1g.6gb", 2))])
    claimed = [{"uuid": "", "holder": HOLDER}]
    refused(node, HOLDER, "not published", config=TWO, claimed=claimed)
    assert node.run(config=FOUR, claimed=claimed)["changed"]


def test_process_and_claim_are_both_named(node):
    node = node(new_gpu(0, A30))
    devices = node.run(config=FOUR)["gpus"][0]["mig_devices"]
    node.edit(processes=[[4194300, "train.py", devices[0]["gi_id"]]])
    claimed = [{"uuid": devices[3]["uuid"], "holder": HOLDER}]
    refused(
        node,
        "process 4194300 (train.py)",
        HOLDER,
        "Stop these processes",
        "Delete the pod",
        config=TWO,
        claimed=claimed,
    )


def test_a_card_without_mig_is_refused(node):
    node = node(new_gpu(0, T4))
    refused(
        node, "GPU 0 (Tesla T4) cannot do MIG, but layout 'x', entry 1 wants it on", config=FOUR, layout="x"
    )
    assert not node.run(config=[layout(enabled=False)])["changed"]


@pytest.mark.parametrize(
    ("error", "part", "fix"),
    [
        (
            [18, "Failed to initialize NVML: Driver/library version mismatch\n"],
            "different versions",
            "Reboot",
        ),
        (
            [9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"],
            "not loaded",
            "modprobe",
        ),
        (
            [15, "Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.\n"],
            "fallen off the bus",
            "Xid 79",
        ),
        ([6, "No devices were found\n"], "sees no such GPU", "lspci"),
        ([0, "GPU-weather: fine\n"], "cannot be read: 'GPU-weather: fine'", "by hand"),
        ([139, ""], "exit status 139: no output", ""),
    ],
)
def test_a_driver_that_does_not_answer_is_one_clear_message(node, error, part, fix):
    node = node(new_gpu(0, A30), whole_error=error)
    refused(node, part, fix, config=FOUR, as_program=True)


def test_a_missing_program_is_one_clear_message(node):
    node = node(new_gpu(0, A30))
    refused(
        node,
        "/nowhere/nvidia-smi was not found",
        "mig_nvidia_smi",
        config=FOUR,
        nvidia_smi="/nowhere/nvidia-smi",
        as_program=True,
    )


def test_a_program_that_hangs_is_stopped(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    start = time.monotonic()
    with pytest.raises(NvidiaSmiError, match=r"`nvidia-smi -L` did not end within 0\.2 s"):
        runner(str(program), 0.2)(["-L"])
    assert time.monotonic() - start < 5


def test_a_broken_record_stops_a_restore(node):
    node = node(new_gpu(0, A30))
    node.record.parent.mkdir()
    node.record.write_text("half a rec")
    refused(node, "mig-layout.json cannot be read", state="restored")


# -- changes that fail on the way


def test_a_mode_that_stays_pending_is_taken_back(node):
    node = node(new_gpu(0, A30, busy=True))  # held by something that does not show
    result = refused(node, "GPU 0: enable MIG mode: it stays pending and was taken back", config=FOUR)
    assert "former layout is back" in result["msg"]
    assert node.mode() == ("Disabled", "Disabled")
    assert not node.record.exists()


def test_a_gpu_that_cannot_be_reset_says_so(node):
    node = node(new_gpu(0, H200, noreset=True))
    refused(node, "stays pending", "reboot the node", config=[layout(("1g.18gb", 7))])


def test_a_reset_may_be_forbidden(node):
    node = node(new_gpu(0, A30))
    refused(node, "mig_reset: true", config=FOUR, reset=False)
    assert not any("reset" in command for command in node.log())


def test_a_partial_creation_is_reported_and_taken_back(node):
    node = node(new_gpu(0, A30, insufficient_after=2))
    result = node.run(config=FOUR)
    assert result["failed"]
    assert not result["changed"]
    for part in (
        "Failed step: GPU 0: create 1g.6gb at 0:1",
        "Insufficient Resources",
        "Done before it: GPU 0: enable MIG mode",
        "Made by this run: GPU 0: 1g.6gb at 0:1 (GPU instance 7), GPU 0: 1g.6gb at 1:1 (GPU instance 8)",
        "The former layout is back",
    ):
        assert part in result["msg"]
    assert node.mode() == ("Disabled", "Disabled")
    assert node.cut() == []
    assert not node.record.exists()


def test_the_former_instances_come_back_after_a_partial_creation(node):
    node = node(new_gpu(0, A30))
    node.run(config=FOUR)
    node.edit(insufficient_after=1)
    state = node.load()["gpus"][0]
    result = node.run(config=TWO)
    assert result["failed"]
    # one more creation was allowed before the fault, so the former four cannot all come back
    assert "could not be put back" in result["msg"]
    assert "Insufficient Resources" in result["msg"]
    assert "Destroyed by this run: GPU 0: 1g.6gb" in result["msg"]
    assert result["changed"]
    assert result["gpus"][0]["mig_mode_current"] == "Enabled"
    assert node.record.exists()
    node.edit(insufficient_after=None)
    assert node.run(config=FOUR)["changed"]
    assert node.cut() == sorted((item["name"], item["start"]) for item in state["instances"])


def test_an_instance_held_by_something_unseen_is_named_as_far_as_possible(node):
    node = node(new_gpu(0, A30))
    node.run(config=FOUR)
    node.edit(busy=True)
    before = node.load()["gpus"]
    result = node.run(config=TWO)
    assert "destroy the compute instances of GPU instance" in result["msg"]
    assert "In use by another client" in result["msg"]
    assert "processes with the driver loaded" in result["msg"]
    assert node.load()["gpus"] == before


@pytest.mark.usefixtures("no_real_processes")
def test_a_persistence_daemon_is_no_reason_to_refuse_but_named_when_the_mode_is_stuck():
    daemon = Holder(0, 812, "nvidia-persiste", "holds its device file open")
    want = {0: Want(True, (("1g.18gb", 1),))}
    smi = NvidiaSmi(FakeNvidiaSmi([new_gpu(0, H200)]).run)
    plan = plan_node(smi, read_gpus(smi), want)
    plan.holders = [daemon]
    assert blockers(plan) == []
    assert apply_plan(smi, plan, may_reset=True)[0][0].mode_current == "Enabled"

    fake = FakeNvidiaSmi([new_gpu(0, A30)])
    smi = NvidiaSmi(fake.run)
    plan = plan_node(smi, read_gpus(smi), {0: Want(True, (("1g.6gb", 1),))})
    plan.holders = [daemon]
    with pytest.raises(ChangeError, match=r"held by: process 812 \(nvidia-persiste\)") as caught:
        apply_plan(smi, plan, may_reset=True)
    assert "nvidia-persistenced counts as a holder" in caught.value.fix
    assert caught.value.restored
    assert ["-i", "0", "--gpu-reset"] not in fake.log


def test_a_failure_on_the_second_gpu_takes_the_first_back(node):
    node = node(new_gpu(0, H200), new_gpu(1, H200, insufficient_after=3))
    result = node.run(config=[layout(("1g.18gb", 7))])
    assert result["failed"]
    assert not result["changed"]
    assert [node.mode(gpu) for gpu in (0, 1)] == [("Disabled", "Disabled")] * 2


# -- who holds what


def proc_of(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_open_device_files_name_process_and_pod(tmp_path):
    uid = "0f0f0f0f-1111-2222-3333-444444444444"
    proc = proc_of(
        tmp_path / "proc",
        **{
            "77__comm": "python3\n",
            "77__cgroup": f"0::/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-x.scope\n",
            "78__comm": "dcgm\n",
            "78__cgroup": "0::/system.slice\n",
            "79__comm": "nvidia-smi\n",
            "80__comm": "bash\n",
            "driver__nvidia-caps__mig-minors": "config 1\ngpu0/gi3/access 30\ngpu0/gi3/ci0/access 31\n",
        },
    )
    for pid, targets in {
        77: ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap31", "/dev/null"],
        78: ["/dev/nvidia0", "/dev/nvidiactl"],
        79: ["/dev/nvidia0"],
        80: ["/dev/null"],
    }.items():
        (proc / str(pid) / "fd").mkdir()
        for number, target in enumerate(targets):
            (proc / str(pid) / "fd" / str(number)).symlink_to(target)
    logs = tmp_path / "pods"
    (logs / f"team-a_train-0_{uid}").mkdir(parents=True)
    smi = NvidiaSmi(FakeNvidiaSmi([new_gpu(0, A30)]).run)
    holders = find_holders(smi, read_gpus(smi), str(proc), str(logs))
    assert [str(holder) for holder in holders] == [
        "process 77 (python3, pod team-a/train-0) in GPU instance 3 [holds its device file open]",
        "process 78 (dcgm) [holds its device file open]",
    ]


def test_a_pod_without_a_name_shows_its_uid(tmp_path):
    uid = "0f0f0f0f-1111-2222-3333-444444444444"
    proc = proc_of(tmp_path, **{"5__cgroup": f"11:devices:/kubepods/pod{uid}/abc\n"})
    assert pod_of(5, str(proc), str(tmp_path / "none")) == f"uid {uid}"
    assert pod_of(6, str(proc)) == ""


def test_processes_with_the_driver_library_are_suspects(tmp_path):
    proc = proc_of(
        tmp_path,
        **{
            "7__comm": "exporter\n",
            "7__maps": "7f00-7f01 r-xp 0 0:0 0 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05\n",
            "8__comm": "bash\n",
            "8__maps": "7f00-7f01 r-xp 0 0:0 0 /usr/lib/libc.so.6\n",
        },
    )
    assert [holder.name for holder in library_users(str(proc), "/none")] == ["exporter"]


# -- the filters around it


def filters():
    spec = importlib.util.spec_from_file_location("mig_filters", ROOT / "plugins/filter/mig.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FilterModule().filters()


def test_report_rows_say_what_a_gpu_is(node):
    node = node(new_gpu(0, A30), new_gpu(1, T4))
    result = node.run(config=[layout(("1g.6gb", 2), ("2g.12gb", 1), devices=[0])])
    checks = filters()["mig_checks"]
    rows = checks(result["gpus"], "a30", "mixed", result["plan"])
    assert [(row["id"], row["found"]) for row in rows] == [
        ("mig-a30-gpu0", "MIG Enabled, 2 x 1g.6gb, 1 x 2g.12gb"),
        ("mig-a30-gpu1", "MIG N/A"),
    ]
    assert len(rows[0]["evidence"]["devices"]) == 3
    assert rows[0]["asked"] == "a30 GPU 0 (NVIDIA A30): layout mixed"
    assert rows[1]["asked"] == "a30 GPU 1 (Tesla T4): left alone (no entry of mixed matches)"
    assert checks(result["gpus"], "a30", "")[0]["asked"].endswith("read only (mig_config is empty)")
    back = checks(result["gpus"], "a30", "", result["plan"], restored=True)
    assert [row["asked"].split(": ")[1] for row in back] == [
        "the layout from before the first run",
        "left alone (no layout was recorded)",
    ]


def test_each_node_gets_the_claims_on_its_own_devices():
    device = {"pool": "n1", "device": "d0", "node": "n1", "uuid": "MIG-1", "parent_uuid": "GPU-1"}
    allocation = {"devices": {"results": [{"driver": "gpu.nvidia.com", "pool": "n1", "device": "d0"}]}}
    claim = {
        "metadata": {"namespace": "train", "name": "c"},
        "status": {"allocation": allocation, "reservedFor": [{"resource": "pods", "name": "p"}]},
    }
    facts = {"slices": {"devices": [device]}, "claims": [claim]}
    assert filters()["mig_claimed"](facts, "n1") == [{"uuid": "MIG-1", "holder": HOLDER}]
    assert filters()["mig_claimed"](facts, "n2") == []
    assert filters()["mig_claimed"]({"slices": {"devices": []}, "claims": []}, "n1") == []


def test_a_layout_file_that_is_not_yaml_is_named():
    with pytest.raises(AnsibleFilterError, match=r"f\.yaml is not YAML"):
        filters()["mig_merge_configs"]({}, "a: [", "f.yaml")
    with pytest.raises(AnsibleFilterError, match="must say `version: v1`"):
        filters()["mig_merge_configs"]({}, "mig-configs: {a: []}", "f.yaml")
