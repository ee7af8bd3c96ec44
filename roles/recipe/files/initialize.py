"""Put the base model or the data set of a recipe on the shared volume. Runs in the pod of an initializer.

    python3 initialize.py model|dataset [--only-prepare]

STORAGE_URI says from where: ``hf://org/name`` (a hub; HF_ENDPOINT names another than Hugging Face's, and
ACCESS_TOKEN or HF_TOKEN is its token), ``file:///path`` (a folder of this image) or ``pvc://claim/path`` (a
folder of another volume, which the runtime mounts at /source). It goes to /workspace/model or
/workspace/dataset, where Kubeflow Trainer's own initializers put theirs.

A note beside the folder says what it holds, so the same source is not fetched twice; another source takes
the folder's place, and a folder without a note is left alone and refused. ``--only-prepare`` makes room and
leaves the fetching to Trainer's own image. Ends with ``<kind>-initializer: OK``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence
from urllib.parse import urlparse

WORKSPACE = Path("/workspace")
SOURCE = Path("/source")
WEIGHTS = (".safetensors", ".bin")
DATA = (".json", ".jsonl", ".csv", ".parquet")
# What of a model's repository a fine-tune reads; the rest is for other programs and can be large.
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
UNWANTED = ["original/*", "*.msgpack", "*.h5", "*.onnx", "*.gguf"]
# A hub can fail for a moment; when it says that somebody may not, or that there is none, it stays so.
PAUSES = (5, 20)
FINAL = {400, 401, 403, 404, 410}
# Old repositories have no safetensors.
PICKLED = "*.bin"


class InitializeError(RuntimeError):
    """What stands in the way; the message says found, needed and what to do."""


def note_of(folder: Path) -> Path:
    """The file that says what the folder holds."""
    return folder.parent / f".{folder.name}.source.json"


def read_note(folder: Path) -> dict[str, Any]:
    """What the folder's note says; {} without one."""
    try:
        value = json.loads(note_of(folder).read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_note(folder: Path, note: dict[str, Any]) -> None:
    """Write the note so that it is there whole or not at all."""
    path = note_of(folder)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(note, sort_keys=True) + "\n")
    fresh.replace(path)


def files_in(folder: Path) -> list[Path]:
    """All files below a folder in order, without hidden ones (a hub's cache keeps some beside them)."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not any(p.startswith(".") for p in path.relative_to(folder).parts)]


def make_room(folder: Path, uri: str) -> bool:
    """An empty folder for this source, or False when it is there already, whole."""
    note = read_note(folder)
    if folder.exists() and any(folder.iterdir()) and not note:
        raise InitializeError(
            f"found {folder} with files that no initializer put there; needed an empty folder: choose "
            "another recipe_claim_folder, or move them"
        )
    if note.get("uri") == uri and note.get("complete") and digest(files_in(folder)) == note.get("names"):
        return False
    if note:
        print(f"{folder} held {note.get('uri')}, making room for {uri}", flush=True)
    # What must go goes first: on a full volume there is no room even for a note. The former note stays
    # meanwhile: a folder half removed is still known to be ours, and its files no longer match it.
    if folder.exists():
        shutil.rmtree(folder)
    write_note(folder, {"uri": uri, "complete": False})
    folder.mkdir(parents=True)
    return True


def digest(paths: Sequence[Path]) -> str:
    """A hash of names and sizes: enough to see that something is missing, and cheap for large files."""
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
    return total.hexdigest()


def source_folder(uri: str, kind: str) -> Path:
    """Where a local source is in this container."""
    parts = urlparse(uri)
    if parts.scheme == "file":
        return Path(parts.path)
    return SOURCE / kind / parts.path.lstrip("/")


def copy(source: Path, folder: Path, uri: str) -> None:
    """Copy a local folder, or one file of a data set."""
    if source.is_file():
        shutil.copyfile(source, folder / source.name)
        return
    if not source.is_dir():
        near = source.parent
        while not near.is_dir():
            near = near.parent
        inside = ", ".join(sorted(path.name for path in near.iterdir())[:8]) or "nothing"
        raise InitializeError(
            f"found no {source} ({near} holds {inside}); needed for {uri}: correct the path"
        )
    for path in files_in(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def download(uri: str, kind: str, folder: Path) -> None:
    """Fetch a repository of a hub."""
    try:
        import huggingface_hub  # noqa: PLC0415
    except ImportError as fault:
        raise InitializeError(
            f"found no huggingface_hub in the image ({fault}); needed for {uri}: use another image, or a "
            "file:// or pvc:// source"
        ) from fault
    parts = urlparse(uri)
    name = parts.netloc + parts.path.rstrip("/")
    token = os.environ.get("ACCESS_TOKEN") or os.environ.get("HF_TOKEN") or None

    def fetch() -> None:
        wanted: dict[str, Any] = {}
        if kind == "model":
            listed = huggingface_hub.HfApi(token=token).list_repo_files(name)
            pickled = [] if any(file.endswith(".safetensors") for file in listed) else [PICKLED]
            wanted = {"allow_patterns": WANTED + pickled, "ignore_patterns": UNWANTED}
        huggingface_hub.snapshot_download(
            repo_id=name,
            repo_type="dataset" if kind == "dataset" else "model",
            local_dir=str(folder),
            token=token,
            **wanted,
        )

    persist(name, fetch)


def persist(name: str, fetch: Callable[[], None]) -> None:
    """Try again when a hub fails for a moment; what is there already is not fetched twice."""
    for pause in (*PAUSES, None):
        try:
            fetch()
        except Exception as fault:
            status = getattr(getattr(fault, "response", None), "status_code", None)
            if pause is None or status in FINAL:
                raise refused(name, fault) from fault
            print(f"{type(fault).__name__}, trying again in {pause} s", flush=True)
            time.sleep(pause)
        else:
            return


def refused(name: str, fault: Exception) -> InitializeError:
    """A hub's refusal in one line. The library raises many kinds, and some texts are long."""
    said = " ".join(str(fault).split())[:300]
    hub = os.environ.get("HF_ENDPOINT") or "the hub"
    return InitializeError(
        f"{hub} did not give {name}: {type(fault).__name__}: {said}; needed its files: correct the name, "
        "give a token (recipe_hf_token_secret), name a mirror (recipe_hf_endpoint), or use file:// or pvc://"
    )


def check(kind: str, folder: Path, uri: str) -> list[Path]:
    """The folder must hold what a fine-tune needs."""
    files = files_in(folder)
    names = ", ".join(str(path.relative_to(folder)) for path in files[:8]) or "nothing"
    if kind == "dataset":
        if not any(path.suffix in DATA for path in files):
            raise InitializeError(f"found {names} in {uri}; needed a file of {', '.join(DATA)}")
        return files
    missing = [
        what
        for what, there in (
            ("config.json", (folder / "config.json").is_file()),
            ("a tokenizer", any(path.name.startswith("tokenizer") for path in files)),
            ("weights (*.safetensors)", any(path.suffix in WEIGHTS for path in files)),
        )
        if not there
    ]
    if missing:
        raise InitializeError(f"found {names} in {uri}; needed besides: {', '.join(missing)}")
    return files


def initialize(kind: str, uri: str, only_prepare: bool = False) -> None:
    """Bring one source to the volume."""
    folder = WORKSPACE / kind
    scheme = urlparse(uri).scheme
    if scheme not in {"hf", "file", "pvc"} and not only_prepare:
        raise InitializeError(
            f"found STORAGE_URI '{uri}'; needed hf://org/name, file:///path or pvc://claim/path"
        )
    fresh = make_room(folder, uri)
    if only_prepare:
        print(f"room made for {uri}" if fresh else f"{uri} is there", flush=True)
        return
    if fresh:
        print(f"fetching {uri} to {folder}", flush=True)
        if scheme == "hf":
            download(uri, kind, folder)
        else:
            copy(source_folder(uri, kind), folder, uri)
    files = check(kind, folder, uri)
    write_note(folder, {"uri": uri, "complete": True, "names": digest(files)})
    size = sum(path.stat().st_size for path in files)
    state = "fetched" if fresh else "there already"
    print(f"{uri}: {len(files)} files, {size} bytes, {state}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 with OK as the last line, or 1 with the reason."""
    parser = argparse.ArgumentParser(description="put a model or a data set on the shared volume")
    parser.add_argument("kind", choices=["model", "dataset"])
    parser.add_argument("--only-prepare", action="store_true", help="make room, fetch nothing")
    options = parser.parse_args(arguments)
    name = f"{options.kind}-initializer"
    try:
        initialize(options.kind, os.environ.get("STORAGE_URI", ""), options.only_prepare)
    except InitializeError as fault:
        print(f"{name}: FAILED: {fault}", flush=True)
        return 1
    except OSError as fault:
        print(
            f"{name}: FAILED: {fault}; needed a source that user {os.getuid()} can read and a volume that it "
            "can write, with enough room: see recipe_storage_size, recipe_storage_class",
            flush=True,
        )
        return 1
    print(f"{name}: OK", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
