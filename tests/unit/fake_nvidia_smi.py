#!/usr/bin/env python3
"""A nvidia-smi with a memory, for tests: GPUs live in a JSON file, or in a Python object.

It knows the cards by its own table and enforces what hardware enforces: placements, a mode that only an idle
GPU switches (with a reset on Ampere), instances that cannot be destroyed while in use, and `-cgi` that keeps
what it made before a failure. Faults are armed by setting keys of a GPU (see ``new_gpu``).
"""

from __future__ import annotations

import json
import os
import sys

SEVEN = {0, 1, 2, 3, 4, 5, 6}


def seven(a, b, c, d):
    return [
        (19, f"1g.{a}gb", 1, SEVEN, 7),
        (20, f"1g.{a}gb+me", 1, SEVEN, 1),
        (15, f"1g.{b}gb", 2, {0, 2, 4, 6}, 4),
        (14, f"2g.{b}gb", 2, {0, 2, 4}, 3),
        (9, f"3g.{c}gb", 4, {0, 4}, 2),
        (5, f"4g.{c}gb", 4, {0}, 1),
        (0, f"7g.{d}gb", 8, {0}, 1),
    ]


A30 = [
    (14, "1g.6gb", 1, {0, 1, 2, 3}, 4),
    (21, "1g.6gb+me", 1, {0, 1, 2, 3}, 1),
    (5, "2g.12gb", 2, {0, 2}, 2),
    (6, "2g.12gb+me", 2, {0, 2}, 1),
    (0, "4g.24gb", 4, {0}, 1),
]
# product -> (PCI device id, MiB, architecture, profiles)
CARDS = {
    "NVIDIA A30": ("0x20B710DE", 24576, "Ampere", A30),
    "NVIDIA A100-SXM4-40GB": ("0x20B010DE", 40960, "Ampere", seven(5, 10, 20, 40)),
    "NVIDIA A100 80GB PCIe": ("0x20B510DE", 81920, "Ampere", seven(10, 20, 40, 80)),
    "NVIDIA H100 80GB HBM3": ("0x233010DE", 81559, "Hopper", seven(10, 20, 40, 80)),
    "NVIDIA H200": ("0x233510DE", 143771, "Hopper", seven(18, 35, 71, 141)),
    "NVIDIA H100 NVL": ("0x232110DE", 95830, "Hopper", seven(12, 24, 47, 94)),
    "Tesla T4": ("0x1EB810DE", 15360, "Turing", []),
}
IN_USE = "In use by another client"
RESOURCES = "Insufficient Resources"
INVALID = "Invalid Argument"
NOT_FOUND = "Not Found"


def new_gpu(index, product, **more):
    """State of one GPU. ``more``: processes [(pid, name, gi or None)], busy, noreset, insufficient_after."""
    return {
        "index": index,
        "product": product,
        "uuid": f"GPU-0000000{index}-1111-2222-3333-444444444444",
        "bus": f"00000000:{index + 1:02X}:00.0",
        "mode": "Disabled" if CARDS[product][3] else "[N/A]",
        "pending": "Disabled" if CARDS[product][3] else "[N/A]",
        "instances": [],
        "serial": 0,
        "processes": [],
        "busy": False,
        "noreset": False,
        "insufficient_after": None,
        **more,
    }


class FakeNvidiaSmi:
    """``run(args)`` -> (exit status, text). ``log`` holds every command that asked for a change."""

    def __init__(self, gpus, width=79):
        self.gpus = gpus
        self.width = width
        self.log = []
        self.whole_error = None

    # -- entry

    def run(self, args):
        args = list(args)
        if self.whole_error:
            return self.whole_error
        if args == ["-L"]:
            return 0, self.listing()
        if args == ["-q", "-x"]:
            return 0, self.xml()
        if args and args[0].startswith("--query-gpu="):
            return 0, self.query(args[0].split("=", 1)[1].split(","))
        if args and args[0].startswith("--query-compute-apps="):
            return 0, self.apps()
        if args and args[0] == "mig":
            return self.mig(args[1:])
        if len(args) >= 3 and args[0] == "-i":
            gpu = self.find(args[1])
            if gpu is None:
                return 6, "No devices were found\n"
            self.log.append(args)
            if args[2] == "-mig":
                return 0, self.set_mode(gpu, args[3] == "1")
            if args[2] in ("--gpu-reset", "-r"):
                return self.reset(gpu)
        return (
            255,
            f"ERROR: Option {args[0] if args else ''} is not recognized. Please run 'nvidia-smi -h'.\n\n",
        )

    def find(self, text):
        return next((gpu for gpu in self.gpus if str(gpu["index"]) == text), None)

    # -- reading

    def listing(self):
        rows = []
        for gpu in self.gpus:
            rows.append(f"GPU {gpu['index']}: {gpu['product']} (UUID: {gpu['uuid']})")
            number = 0
            for item in sorted(gpu["instances"], key=lambda i: i["gi"]):
                for compute in item["cis"]:
                    rows.append(f"  MIG {compute['name']:<11} Device {number:>2}: (UUID: {compute['uuid']})")
                    number += 1
        return "\n".join(rows) + "\n"

    def query(self, fields):
        rows = []
        for gpu in self.gpus:
            device_id, memory, _arch, _profiles = CARDS[gpu["product"]]
            values = {
                "index": gpu["index"],
                "uuid": gpu["uuid"],
                "name": gpu["product"],
                "pci.bus_id": gpu["bus"],
                "pci.device_id": device_id,
                "memory.total": memory,
                "mig.mode.current": gpu["mode"],
                "mig.mode.pending": gpu["pending"],
                "driver_version": "580.95.05",
            }
            rows.append(", ".join(str(values[field]) for field in fields))
        return "\n".join(rows) + "\n"

    def apps(self):
        return "".join(
            f"{gpu['uuid']}, {pid}, {name}, 512 MiB\n"
            for gpu in self.gpus
            for pid, name, _gi in gpu["processes"]
        )

    def xml(self):
        body = ""
        for gpu in self.gpus:
            processes = "".join(
                f"<process_info><gpu_instance_id>{'N/A' if gi is None else gi}</gpu_instance_id>"
                f"<compute_instance_id>{'N/A' if gi is None else 0}</compute_instance_id><pid>{pid}</pid>"
                f"<type>C</type><process_name>{name}</process_name></process_info>"
                for pid, name, gi in gpu["processes"]
            )
            body += (
                f'<gpu id="{gpu["bus"]}">'
                f"<product_architecture>{CARDS[gpu['product']][2]}</product_architecture>"
                f"<uuid>{gpu['uuid']}</uuid><minor_number>{gpu['index']}</minor_number>"
                f"<processes>{processes}</processes></gpu>"
            )
        return f'<?xml version="1.0" ?>\n<nvidia_smi_log>{body}</nvidia_smi_log>\n'

    def table(self, title, header, rows):
        inner = self.width - 2
        border = "+" + "-" * inner + "+"
        lines = [border, *(f"| {text:<{inner - 1}}|" for text in (title, *header)), "|" + "=" * inner + "|"]
        for row in rows:
            lines += [f"| {text:<{inner - 1}}|" for text in row] + [border]
        return "\n".join(lines) + "\n"

    # -- mig

    def mig(self, args):
        options = {}
        flags = set()
        key = None
        for arg in args:
            if arg in ("-i", "-gi", "-ci", "-cgi"):
                key = arg
            elif arg.startswith("-"):
                flags.add(arg)
                key = None
            elif key:
                options[key] = arg
                key = None
        chosen = [gpu for gpu in self.gpus if "-i" not in options or str(gpu["index"]) == options["-i"]]
        capable = [gpu for gpu in chosen if CARDS[gpu["product"]][3]]
        if "-lgip" in flags:
            return self.lgip(capable)
        if "-lgipp" in flags:
            return self.lgipp(capable)
        enabled = [gpu for gpu in capable if gpu["mode"] == "Enabled"]
        if not enabled:
            return 0, "No MIG-enabled devices found.\n"
        if "-lgi" in flags:
            return self.lgi(enabled)
        if "-lci" in flags:
            return self.lci(enabled)
        self.log.append(["mig", *args])
        gi_ids = [int(text) for text in options["-gi"].split(",")] if "-gi" in options else None
        if "-cgi" in options:
            return self.create(enabled[0], options["-cgi"].split(","), "-C" in flags)
        if "-cci" in flags:
            return self.create_compute(enabled[0], gi_ids)
        if "-dci" in flags:
            return self.destroy(enabled[0], gi_ids, compute_only=True)
        return self.destroy(enabled[0], gi_ids, compute_only=False)

    def lgip(self, gpus):
        if not gpus:
            return 6, "No MIG-supported devices found.\n"
        rows = []
        for gpu in gpus:
            for number, name, size, _starts, total in CARDS[gpu["product"]][3]:
                used = sum(1 for item in gpu["instances"] if item["id"] == number)
                rows.append(
                    (
                        f"  {gpu['index']}  MIG {name:<14} {number:>3}     {total - used}/{total}"
                        f"        {size * 4.75:.2f}       No     14     1     0",
                        "                                                               1     1     0",
                    )
                )
        return 0, self.table("GPU instance profiles:", ["GPU   Name   ID    Instances"], rows)

    def lgipp(self, gpus):
        text = ""
        for gpu in gpus:
            for number, _name, size, starts, _total in CARDS[gpu["product"]][3]:
                word = "Placements" if len(starts) > 1 else "Placement "
                listed = ",".join(str(start) for start in sorted(starts))
                text += f"GPU {gpu['index']:>2} Profile ID {number:>2} {word}: {{{listed}}}:{size}\n"
        return 0, text

    def lgi(self, gpus):
        rows = [
            (f"  {gpu['index']}  MIG {i['name']:<16} {i['id']:>3} {i['gi']:>8} {i['start']:>9}:{i['size']}",)
            for gpu in gpus
            for i in gpu["instances"]
        ]
        if not rows:
            return 6, "No GPU instances found: Not Found\n"
        return 0, self.table("GPU instances:", ["GPU   Name             Profile  Instance   Placement"], rows)

    def lci(self, gpus):
        rows = [
            (f"  {gpu['index']} {i['gi']:>6}     MIG {c['name']:<16} 0 {c['ci']:>9}        0:{i['size']}",)
            for gpu in gpus
            for i in gpu["instances"]
            for c in i["cis"]
        ]
        if not rows:
            return 6, "No compute instances found: Not Found\n"
        return 0, self.table(
            "Compute instances:", ["GPU     GPU       Name             Profile   Instance"], rows
        )

    def create(self, gpu, wanted, with_compute):
        text = ""
        for item in wanted:
            number, _colon, place = item.partition(":")
            profile = next((p for p in CARDS[gpu["product"]][3] if str(p[0]) == number), None)
            if profile is None:
                return self.refuse_create(gpu, number, text, INVALID, 2)
            _id, name, size, starts, total = profile
            taken = {s for i in gpu["instances"] for s in range(i["start"], i["start"] + i["size"])}
            free = [s for s in sorted(starts) if not taken & set(range(s, s + size))]
            start = int(place) if place else (free[0] if free else None)
            count = sum(1 for i in gpu["instances"] if i["id"] == profile[0])
            if start not in free or count >= total or gpu["insufficient_after"] == 0:
                return self.refuse_create(gpu, number, text, RESOURCES, 23)
            if gpu["insufficient_after"]:
                gpu["insufficient_after"] -= 1
            gi = self.free_id(gpu, size)
            made = {"gi": gi, "id": profile[0], "name": name, "start": start, "size": size, "cis": []}
            gpu["instances"].append(made)
            text += (
                f"Successfully created GPU instance ID {gi:>2} on GPU {gpu['index']:>2}"
                f" using profile MIG {name} (ID {profile[0]:>2})\n"
            )
            if with_compute:
                text += self.add_compute(gpu, made)
        return 0, text

    def refuse_create(self, gpu, number, text, why, rc):
        text += f"Unable to create a GPU instance on GPU {gpu['index']:>2} using profile {number}: {why}\n"
        return rc, text + f"Failed to create GPU instances: {why}\n"

    def free_id(self, gpu, size):
        base = {8: 0, 4: 1, 2: 3, 1: 7}[size]
        used = {item["gi"] for item in gpu["instances"]}
        return next(number for number in range(base, 99) if number not in used)

    def add_compute(self, gpu, item):
        gpu["serial"] += 1
        uuid = f"MIG-{gpu['index']:08d}-0000-5000-8000-{gpu['serial']:012d}"
        item["cis"].append({"ci": 0, "name": item["name"], "uuid": uuid})
        return (
            f"Successfully created compute instance ID  0 on GPU {gpu['index']:>2}"
            f" GPU instance ID {item['gi']:>2} using profile MIG {item['name']} (ID  0)\n"
        )

    def create_compute(self, gpu, gi_ids):
        text = ""
        for item in gpu["instances"]:
            if item["gi"] in gi_ids:
                if item["cis"]:
                    return 23, text + f"Failed to create compute instances: {RESOURCES}\n"
                text += self.add_compute(gpu, item)
        return 0, text

    def destroy(self, gpu, gi_ids, compute_only):
        text = ""
        used = {gi for _pid, _name, gi in gpu["processes"]}
        what = "compute instance" if compute_only else "GPU instance"
        for item in list(gpu["instances"]):
            if gi_ids is not None and item["gi"] not in gi_ids:
                continue
            where = f"from GPU {gpu['index']:>2}"
            if compute_only:
                if item["gi"] in used or gpu["busy"]:
                    text += f"Unable to destroy compute instance ID  0 {where}"
                    text += f" GPU instance ID {item['gi']:>2}: {IN_USE}\n"
                    return 19, text + f"Failed to destroy {what}s: {IN_USE}\n"
                for compute in item["cis"]:
                    text += (
                        f"Successfully destroyed compute instance ID {compute['ci']:>2} {where}"
                        f" GPU instance ID {item['gi']:>2}\n"
                    )
                item["cis"] = []
            else:
                if item["cis"]:
                    text += f"Unable to destroy GPU instance ID {item['gi']:>2} {where}: {IN_USE}\n"
                    return 19, text + f"Failed to destroy {what}s: {IN_USE}\n"
                gpu["instances"].remove(item)
                text += f"Successfully destroyed GPU instance ID {item['gi']:>2} {where}\n"
        return 0, text

    # -- mode

    def held(self, gpu):
        return bool(gpu["busy"] or gpu["processes"])

    def set_mode(self, gpu, enabled):
        mode = "Enabled" if enabled else "Disabled"
        gpu["pending"] = mode
        word = "enable" if enabled else "disable"
        if gpu["mode"] == mode:
            return f"{mode} MIG Mode for GPU {gpu['bus']}\nAll done.\n"
        warning = f"Warning: MIG mode is in pending {word} state for GPU {gpu['bus']}:"
        if self.held(gpu):
            return (
                f"{warning}{IN_USE}\n{gpu['bus']} is currently being used by one or more other processes"
                " (e.g. CUDA application or a monitoring application such as another instance of nvidia-smi)."
                " Please first kill all processes using the device and retry the command or reboot the system"
                " to make MIG mode effective.\nAll done.\n"
            )
        if CARDS[gpu["product"]][2] == "Ampere" or gpu["noreset"]:
            return (
                f"{warning}Not Supported\nReboot the system or try nvidia-smi --gpu-reset to make MIG mode"
                f" effective on GPU {gpu['bus']}\nAll done.\n"
            )
        gpu["mode"] = mode
        gpu["instances"] = []
        return f"{mode} MIG Mode for GPU {gpu['bus']}\nAll done.\n"

    def reset(self, gpu):
        if self.held(gpu) or gpu["noreset"]:
            why = IN_USE if self.held(gpu) else "Not Supported"
            return 255, f"The following GPUs could not be reset:\n  GPU {gpu['bus']}: {why}\n\n"
        gpu["mode"] = gpu["pending"]
        gpu["instances"] = []
        return 0, f"GPU {gpu['bus']} was successfully reset.\nAll done.\n"


def main():
    """Run as a program: the state is the JSON file named by FAKE_NVIDIA_SMI."""
    path = os.environ["FAKE_NVIDIA_SMI"]
    with open(path) as stream:
        state = json.load(stream)
    if os.environ.get("LC_ALL") != "C":
        sys.exit("the caller did not set LC_ALL=C")
    smi = FakeNvidiaSmi(state["gpus"], state.get("width", 81))
    smi.whole_error = tuple(state["whole_error"]) if state.get("whole_error") else None
    rc, text = smi.run(sys.argv[1:])
    state["log"] = state.get("log", []) + smi.log
    with open(path, "w") as stream:
        json.dump(state, stream)
    sys.stdout.write(text)
    return rc


if __name__ == "__main__":
    sys.exit(main())
