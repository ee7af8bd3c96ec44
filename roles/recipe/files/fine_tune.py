"""Fine-tune a model with LlamaFactory inside a GPU slice, and prove that it learned.

Runs in the trainer's pod. The initializers have put the base model to /workspace/model and the data set to
/workspace/dataset. This script splits off rows that the training never sees, writes them down as LlamaFactory
reads them, trains LoRA adapters with LlamaFactory in a process of its own, then loads base and saved adapter
again with peft in another one and compares the loss on the held-out rows. All of it happens in the one slice
that the claim gave. Settings come from ``settings.json`` and ``training.yaml`` beside this file.

Prints one ``[proof]`` line of JSON and ends with ``LlamaFactory LoRA SFT on GPU slice: OK``.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterable, Sequence

from slice_device import DeviceError, Nvml, gib, only_device

HERE = Path(__file__).resolve().parent
WORKSPACE = Path("/workspace")
OK = "LlamaFactory LoRA SFT on GPU slice: OK"
FAILED = "LlamaFactory LoRA SFT on GPU slice: FAILED"

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
LEAST_ROWS = 10
_HELD_OUT = {"test", "validation", "valid", "val", "eval", "dev", "heldout", "held"}
_TRAIN = {"train", "training"}
_NEVER = {"dataset_info.json", "dataset_infos.json", "config.json"}
# The tags of OpenAI's form of a conversation; LlamaFactory's defaults are those of ShareGPT.
_ROLES = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}
_PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("input", "output"),
)
_LAST_LINES = 12


class RecipeError(RuntimeError):
    """What went wrong, in one sentence that says found, needed and what to do."""


# ------------------------------------------------------------------------------------------------------ data


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of one file."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: PLC0415
        except ImportError as fault:
            raise RecipeError(f"found {path.name} and no pyarrow in the image; needed to read it") from fault
        try:
            return list(pyarrow.parquet.read_table(path).to_pylist())
        except ValueError as fault:
            raise RecipeError(
                f"found {path.name} that is no Parquet ({fault}); needed such a file"
            ) from fault
    try:
        # Some programs put a byte order mark first.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as fault:
        raise RecipeError(f"found {path.name} that is not in UTF-8 ({fault}); needed text in it") from fault
    if path.suffix == ".csv":
        try:
            csv.field_size_limit(2**31 - 1)
            return [dict(row) for row in csv.DictReader(io.StringIO(text, newline=""))]
        except csv.Error as fault:
            raise RecipeError(f"found {path.name} that is no CSV ({fault}); needed such a file") from fault
    try:
        value = json.loads(text)
    except ValueError:
        # One object a line, whatever the name says. Other separators of lines may stand inside of strings.
        try:
            value = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as fault:
            raise RecipeError(f"found {path.name} that is neither JSON nor JSON lines ({fault})") from fault
    rows = [value] if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RecipeError(f"found {path.name} that is no list of objects; needed one object a row")
    return rows


def words_of(path: Path) -> set[str]:
    """The words of a file's relative path: data/train-00000-of-00001.parquet -> data, train, ..."""
    return {word for word in re.split(r"[^a-z0-9]+", str(path.with_suffix("")).lower()) if word}


def choose_files(folder: Path, wish: dict[str, Any]) -> tuple[list[Path], list[Path]]:
    """The files to train on and those held out; the latter may be none.

    ``wish`` may name them by patterns: train, held_out. Else the words in their names decide.
    """
    every = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix in FORMATS
        and path.name not in _NEVER
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    names = ", ".join(str(path.relative_to(folder)) for path in every[:8]) or "no file"
    if wish.get("held_out") or wish.get("train"):
        held = [
            path
            for path in every
            if wish.get("held_out") and path.relative_to(folder).match(wish["held_out"])
        ]
        train = [
            path
            for path in every
            if path not in held and path.relative_to(folder).match(wish.get("train") or "*")
        ]
        wrong = [key for key, found in (("train", train), ("held_out", held)) if wish.get(key) and not found]
        if wrong:
            raise RecipeError(
                f"found {names} in the data set, and none of them matches {wish[wrong[0]]}; needed a file "
                f"for {wrong[0]}: correct recipe_dataset_files"
            )
    else:
        held = [path for path in every if words_of(path.relative_to(folder)) & _HELD_OUT]
        rest = [path for path in every if path not in held]
        train = [path for path in rest if words_of(path.relative_to(folder)) & _TRAIN] or rest
    if not train:
        raise RecipeError(
            f"found {names} in the data set; needed a file of {', '.join(FORMATS)} to train on: name it with "
            "recipe_dataset_files"
        )
    return train, held


def registered(folder: Path, files: Iterable[Path]) -> dict[str, Any]:
    """What the data set's own dataset_info.json says of one of the files; {} without one."""
    try:
        entries = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    names = {str(path.relative_to(folder)) for path in files}
    for entry in entries.values() if isinstance(entries, dict) else []:
        if isinstance(entry, dict) and entry.get("file_name") in names:
            return {key: entry[key] for key in ("formatting", "columns", "tags") if key in entry}
    return {}


def describe(row: dict[str, Any]) -> dict[str, Any]:
    """How LlamaFactory is to read rows like this one: formatting, columns, tags."""
    for column in ("messages", "conversations"):
        turns = row.get(column)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if {"role", "content"} <= set(turns[0]):
                return {"formatting": "sharegpt", "columns": {"messages": column}, "tags": dict(_ROLES)}
            if {"from", "value"} <= set(turns[0]):
                return {"formatting": "sharegpt", "columns": {"messages": column}}
    for prompt, response in _PAIRS:
        if prompt in row and response in row:
            columns = {"prompt": prompt, "response": response}
            if prompt == "instruction" and "input" in row:
                columns["query"] = "input"
            columns.update({name: name for name in ("system", "history") if name in row})
            return {"formatting": "alpaca", "columns": columns}
    raise RecipeError(
        f"found rows with the columns {', '.join(sorted(map(str, row)))}; needed instruction and output, "
        "messages, or their like: say which they are with recipe_dataset_format"
    )


def key_of(row: dict[str, Any]) -> str:
    """A row as text, to tell equal ones."""
    return json.dumps(row, sort_keys=True, default=str)


def split(
    train: list[dict[str, Any]], held: list[dict[str, Any]], wanted: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Rows to train on, rows held out, and how many of the former were dropped for being among the latter.

    Without rows of its own for it, a tenth of the data set is held out, ``wanted`` at most, drawn by the
    seed.
    """
    drawn = random.Random(seed)  # noqa: S311 - a reproducible split, not a secret
    if held:
        held = drawn.sample(held, min(wanted, len(held)))
    else:
        if len(train) < LEAST_ROWS:
            raise RecipeError(
                f"found {len(train)} rows; needed at least {LEAST_ROWS}, to hold some of them out"
            )
        order = list(range(len(train)))
        drawn.shuffle(order)
        apart = set(order[: min(wanted, max(1, len(train) // 10))])
        held = [train[index] for index in sorted(apart)]
        train = [row for index, row in enumerate(train) if index not in apart]
    seen = {key_of(row) for row in held}
    kept = [row for row in train if key_of(row) not in seen]
    if not kept:
        raise RecipeError("found no row to train on that is not held out too; needed other rows")
    return kept, held, len(train) - len(kept)


def prepare_data(source: Path, target: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write train.jsonl, held_out.jsonl and dataset_info.json; returns counts."""
    if not source.is_dir():
        raise RecipeError(f"found no {source}; needed what the dataset-initializer puts there: read its log")
    train_files, held_files = choose_files(source, dict(settings.get("dataset_files") or {}))
    train, held = ([row for path in files for row in rows_of(path)] for files in (train_files, held_files))
    if not train:
        raise RecipeError(f"found no row in {', '.join(path.name for path in train_files)}; needed some")
    info = {
        **(registered(source, train_files) or describe(train[0])),
        **dict(settings.get("dataset_format") or {}),
    }
    kept, apart, dropped = split(train, held, int(settings["held_out_rows"]), int(settings["seed"]))
    target.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", kept), ("held_out", apart)):
        lines = (json.dumps(row, default=str, ensure_ascii=False) for row in rows)
        (target / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    entries = {name: {"file_name": f"{name}.jsonl", **info} for name in ("train", "held_out")}
    (target / "dataset_info.json").write_text(json.dumps(entries, indent=2) + "\n")
    whence = f"files {', '.join(p.name for p in held_files)}" if held_files else f"seed {settings['seed']}"
    print(
        f"[data] {len(kept)} rows to train on, {len(apart)} held out ({whence}), {dropped} dropped as they "
        f"are held out, formatting {info.get('formatting', 'alpaca')}",
        flush=True,
    )
    return {"rows_train": len(kept), "rows_held_out": len(apart), "rows_dropped": dropped}


# -------------------------------------------------------------------------------------------------- training


def backend_of(torch: Any) -> dict[str, Any]:
    """What torch works on here: backend, its memory, and its version."""
    facts = {"torch": str(torch.__version__), "backend": "cpu", "cuda_memory_bytes": 0}
    if torch.cuda.is_available():
        if torch.cuda.device_count() != 1:
            raise RecipeError(
                f"found {torch.cuda.device_count()} CUDA devices; needed exactly the claimed one"
            )
        facts["backend"] = "cuda"
        facts["cuda_memory_bytes"] = int(torch.cuda.get_device_properties(0).total_memory)
    return facts


def precision(config: dict[str, Any], backend: str, bf16: bool) -> dict[str, Any]:
    """The training's number format: as given, else 16 bits on a GPU; a CPU computes in 32."""
    given = [key for key in ("bf16", "fp16", "pure_bf16") if key in config]
    if backend == "cpu":
        return {key: value for key, value in config.items() if key not in given}
    return config if given else {**config, ("bf16" if bf16 else "fp16"): True}


def peak_memory(torch: Any, backend: str) -> dict[str, Any]:
    """Peak memory in bytes: allocated on the CUDA device, or resident in this process where there is none."""
    if backend == "cuda":
        return {"peak_bytes": int(torch.cuda.max_memory_allocated()), "peak_kind": "cuda"}
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "peak_kind": "rss"}


def quiet() -> None:
    """Keep transformers from printing the model's config again and again, as LlamaFactory asks it to."""
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_info = logging.set_verbosity_warning


def train(run: Path) -> None:
    """Train with LlamaFactory as its command line does. In a process of its own: its memory goes with it."""
    import torch  # noqa: PLC0415
    import yaml  # noqa: PLC0415

    quiet()
    facts = backend_of(torch)
    config = yaml.safe_load((run / "training.yaml").read_text())
    bf16 = facts["backend"] == "cuda" and torch.cuda.is_bf16_supported()
    config = precision(config, facts["backend"], bf16)
    final = run / "training.yaml"
    final.write_text(yaml.safe_dump(config, sort_keys=False))
    try:
        from llamafactory.cli import main as start  # noqa: PLC0415

        facts["launcher"], words = "llamafactory-cli train", ["llamafactory-cli", "train", str(final)]
    except ImportError as fault:
        # The command line wants all of the web interface as well; the training does not.
        from llamafactory.train.tuner import run_exp as start  # noqa: PLC0415

        print(f"[train] llamafactory-cli cannot be used ({fault}); calling its run_exp", flush=True)
        facts["launcher"], words = "llamafactory.train.tuner.run_exp", ["run_exp", str(final)]
    from llamafactory.extras.env import VERSION  # noqa: PLC0415

    facts["llamafactory"] = str(VERSION)
    facts["started_at"] = round(time.time(), 3)
    sys.argv = words
    start()
    facts["ended_at"] = round(time.time(), 3)
    facts.update(peak_memory(torch, facts["backend"]))
    (run / "train.json").write_text(json.dumps(facts))


def held_out_loss(torch: Any, model: Any, rows: Sequence[dict[str, Any]], device: Any) -> tuple[float, int]:
    """Mean loss of the answers' tokens, and how many there are."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]], device=device)
            labels = torch.tensor(row["labels"], device=device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
            loss = torch.nn.functional.cross_entropy(
                logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
            )
            total += float(loss.item())
            count += int((labels[1:] != -100).sum().item())
    if not count:
        raise RecipeError("found no answer in the held-out rows within cutoff_len; needed some: raise it")
    return total / count, count


def judge(run: Path) -> None:
    """The held-out loss without and with the saved adapter, which is loaded anew. In a process of its own."""
    import torch  # noqa: PLC0415
    import yaml  # noqa: PLC0415
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer  # noqa: PLC0415
    from llamafactory.hparams import get_train_args  # noqa: PLC0415
    from llamafactory.model import load_model, load_tokenizer  # noqa: PLC0415
    from peft import PeftModel  # noqa: PLC0415

    quiet()
    facts = backend_of(torch)
    config = yaml.safe_load((run / "training.yaml").read_text())
    for key in ("max_samples", "packing", "neat_packing", "val_size", "eval_dataset", "do_eval"):
        config.pop(key, None)
    config.update(dataset="held_out", output_dir=str(run / "check"), overwrite_output_dir=True)
    model_args, data_args, training_args, finetuning_args, _ = get_train_args(config)
    tokenizer = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer["tokenizer"], data_args)
    rows = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokenizer)[
        "train_dataset"
    ]
    base = load_model(tokenizer["tokenizer"], model_args, finetuning_args, is_trainable=False)
    device = "cuda" if facts["backend"] == "cuda" else "cpu"
    if not getattr(base, "is_quantized", False):
        base = base.to(device)
    base.eval()
    before, tokens = held_out_loss(torch, base, rows, device)
    model = PeftModel.from_pretrained(base, str(run / "adapter"))
    model.eval()
    after, _ = held_out_loss(torch, model, rows, device)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    facts.update(
        loss_before=round(before, 4),
        loss_after=round(after, 4),
        held_out_tokens=tokens,
        trainable=adapters,
        check_peak_bytes=peak_memory(torch, facts["backend"])["peak_bytes"],
    )
    (run / "check.json").write_text(json.dumps(facts))


def start(part: str, run: Path) -> dict[str, Any]:
    """Run one part in a process of its own, showing its output; returns what it found out."""
    result = run / f"{part}.json"
    with suppress(FileNotFoundError):
        result.unlink()
    last: list[str] = []
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--part", part, "--run", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        # Read as bytes: progress bars draw over themselves with carriage returns, and only their end is kept.
        for line in child.stdout or ():
            text = line.decode("utf-8", "replace").rstrip().rsplit("\r", 1)[-1]
            if text.strip():
                print(text, flush=True)
                last = [*last, text.strip()][-_LAST_LINES:]
    if child.returncode or not result.exists():
        raise RecipeError(failure(part, child.returncode, last))
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def failure(part: str, status: int, last: Sequence[str]) -> str:
    """Why a part ended, from its last lines."""
    text = " ".join(last)
    if "out of memory" in text.lower():
        return (
            f"found no memory left on the slice in {part}; needed a larger slice (recipe_model_parameters, "
            "gpu_slices_memory), or less: cutoff_len, per_device_train_batch_size, quantization_bit in "
            "recipe_training"
        )
    if status < 0:
        return (
            f"found that {part} was killed by signal {-status}; needed its end: with signal 9 raise the "
            "memory limit in recipe_resources"
        )
    said = next((line for line in reversed(last) if "Error" in line), last[-1] if last else "nothing")
    return f"found that {part} ended with status {status}: {said[:400]}; needed its end: read the log above"


def adapter_files(folder: Path) -> list[dict[str, Any]]:
    """Name, size and hash of the adapter's files."""
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.glob("adapter_*"))
    ]
    if not any(str(file["name"]).startswith("adapter_model.") and file["bytes"] for file in files):
        held = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
        raise RecipeError(
            f"found {held} in {folder}; needed adapter_model.safetensors, LlamaFactory's result"
        )
    return files


def sha256(path: Path) -> str:
    """Hash of a file."""
    total = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def training_losses(run: Path) -> dict[str, Any]:
    """First and last logged loss and the number of steps, as LlamaFactory's trainer wrote them down."""
    state = json.loads((run / "adapter/trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state.get("log_history") or [] if "loss" in entry]
    return {
        "steps": state.get("global_step"),
        "train_loss_first": losses[0] if losses else None,
        "train_loss_last": losses[-1] if losses else None,
    }


# ----------------------------------------------------------------------------------------------------- proof


def source_note(kind: str) -> str:
    """Where the initializer took a folder from."""
    try:
        note = json.loads((WORKSPACE / f".{kind}.source.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(note.get("uri") or "")


def fine_tune(settings: dict[str, Any], nvml: Nvml) -> None:
    """Find the device, train in it, compare, and print the proof."""
    devices = nvml.devices()
    device = only_device(devices, os.environ.get("GPU_SLICES_PROFILE", ""))
    print(f"[slice] device={device['name']} total_mem={gib(device['memory_bytes'])} GiB", flush=True)
    if not (WORKSPACE / "model/config.json").is_file():
        raise RecipeError(
            "found no /workspace/model/config.json; needed a model: read the model-initializer's log"
        )
    run = WORKSPACE / "runs" / os.environ["TRAINJOB_NAME"]
    run.mkdir(parents=True, exist_ok=True)
    counts = prepare_data(WORKSPACE / "dataset", run / "data", settings)
    write_training(run)
    trained = start("train", run)
    losses = training_losses(run)
    files = adapter_files(run / "adapter")
    checked = start("check", run)
    kind = "" if trained["peak_kind"] == "cuda" else " (resident memory of the process)"
    print(f"[slice] peak_mem={gib(trained['peak_bytes'])} GiB{kind}", flush=True)
    print(f"[held out] loss {checked['loss_before']} -> {checked['loss_after']} with the adapter", flush=True)
    proof = {
        **counts,
        **losses,
        **checked,
        **trained,
        "devices": devices,
        "driver": nvml.driver_version(),
        "loss_factor": settings["loss_factor"],
        "seed": settings["seed"],
        "model": source_note("model"),
        "dataset": source_note("dataset"),
        "adapter": {
            "claim": settings["claim"],
            "path": f"{settings['folder']}/{(run / 'adapter').relative_to(WORKSPACE)}",
            "files": files,
        },
    }
    (run / "proof.json").write_text(json.dumps(proof, indent=2, sort_keys=True) + "\n")
    print("[proof] " + json.dumps(proof, sort_keys=True), flush=True)
    check_proof(proof, device)


def write_training(run: Path) -> None:
    """The training's YAML with what only the pod knows: where data and result are."""
    import yaml  # noqa: PLC0415

    config = yaml.safe_load((HERE / "training.yaml").read_text())
    config.update(
        model_name_or_path=str(WORKSPACE / "model"),
        dataset_dir=str(run / "data"),
        dataset="train",
        output_dir=str(run / "adapter"),
    )
    (run / "training.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def check_proof(proof: dict[str, Any], device: dict[str, Any]) -> None:
    """The adapter must help on rows it never saw, and the training must have stayed in the slice."""
    before, after, factor = proof["loss_before"], proof["loss_after"], float(proof["loss_factor"])
    if not after <= before * factor:
        raise RecipeError(
            f"found a held-out loss of {after} with the adapter, {before} without; needed at most "
            f"{before * factor:.4f}: train longer (max_steps, num_train_epochs, learning_rate in "
            "recipe_training)"
        )
    if proof["peak_bytes"] > device["memory_bytes"]:
        peak, limit = gib(proof["peak_bytes"]), gib(device["memory_bytes"])
        raise RecipeError(f"found a peak of {peak} GiB; needed at most the slice's {limit} GiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 with OK as the last line, or 1 with the reason."""
    parser = argparse.ArgumentParser(description="LlamaFactory fine-tune that proves itself")
    parser.add_argument("--part", choices=["train", "check"], help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        try:
            (train if options.part == "train" else judge)(options.run)
        except RecipeError as fault:
            print(f"RecipeError: {fault}", flush=True)
            return 1
        return 0
    nvml = None
    try:
        settings = json.loads((HERE / "settings.json").read_text())
        # NVML stays open while training: the device counts as in use by this process.
        nvml = Nvml()
        fine_tune(settings, nvml)
    except ImportError as fault:
        print(f"{FAILED}: the image lacks a Python package: {fault}", flush=True)
        return 1
    except (DeviceError, RecipeError) as fault:
        print(f"{FAILED}: {fault}", flush=True)
        return 1
    except OSError as fault:
        print(f"{FAILED}: {fault}; needed a volume with room that this user can write", flush=True)
        return 1
    finally:
        if nvml is not None:
            with suppress(OSError):
                nvml.close()
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
