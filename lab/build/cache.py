"""The cache: where built things lie, under names that say what they were built from.

A thing lies in `<cache>/build/<kind>/<name>-<key>/`, where the key is a hash over everything that it was
built from. It is built in a temporary directory beside it and renamed when complete, so a directory under
its final name is always whole. A lock for each thing keeps two builders from making the same one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

KEY_LENGTH = 16
PARTIAL = ".partial-"


def cache_root(environ: Mapping[str, str]) -> Path:
    """The cache directory: GPU_SLICES_CACHE, else gpu-slices below the user's cache directory."""
    own = environ.get("GPU_SLICES_CACHE")
    if own:
        return Path(own).absolute()
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache")
    return Path(base).absolute() / "gpu-slices"


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, as hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def key_of(facts: Mapping[str, Any], files: Mapping[str, Path]) -> str:
    """Hash of JSON-able facts and of files (name -> path): the same inputs give the same key anywhere."""
    whole = {
        "facts": facts,
        "files": {
            name: [file_digest(path), bool(path.stat().st_mode & 0o100)] for name, path in files.items()
        },
    }
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


class Cache:
    """Built things of one cache directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.build = root / "build"
        self.logs = root / "log" / "build"

    def path(self, kind: str, name: str, key: str) -> Path:
        """Where a thing lies, built or not."""
        return self.build / kind / f"{name}-{key}"

    @contextlib.contextmanager
    def locked(self, kind: str, name: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold a thing for building; `waiting` is called once when another builder has it.

        Whatever a killed builder left of it half built is gone then.
        """
        (self.build / kind).mkdir(parents=True, exist_ok=True)
        with (self.build / kind / f".{name}.lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            self._drop_partial(kind, name)
            yield

    def sweep(self, things: Iterable[tuple[str, str]]) -> None:
        """Remove what killed builders left half built of these (kind, name), unless one is at it now."""
        for kind, name in things:
            lock = self.build / kind / f".{name}.lock"
            if not lock.exists():
                continue
            with lock.open("w") as handle, contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._drop_partial(kind, name)

    def _drop_partial(self, kind: str, name: str) -> None:
        for partial in self._versions(kind, f"{PARTIAL}{name}"):
            remove(partial)

    def _versions(self, kind: str, name: str) -> list[Path]:
        return list((self.build / kind).glob(f"{name}-{'[0-9a-f]' * KEY_LENGTH}"))

    @contextlib.contextmanager
    def new(self, final: Path) -> Iterator[Path]:
        """A directory to build in; it gets its final name only if the block ends without an exception."""
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.parent / f"{PARTIAL}{final.name}"
        partial.mkdir()
        try:
            yield partial
            remove(final)
            sync_tree(partial)
            partial.rename(final)
        finally:
            remove(partial)

    def drop_old(
        self, kind: str, name: str, current: Path, keep: int, processes: Path = Path("/proc")
    ) -> list[Path]:
        """Remove all but the `keep` newest of a thing; returns what went.

        The current one always stays, and so does what a running lab has mounted.
        """
        others = [path for path in self._versions(kind, name) if path != current]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        gone = [path for path in others[max(keep - 1, 0) :] if not is_mounted(path, processes)]
        for path in gone:
            remove(path)
        return gone


def remove(path: Path) -> None:
    """Remove a file or a tree, also one with read-only directories; nothing there is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def is_mounted(path: Path, processes: Path) -> bool:
    """Whether any process, in whatever mount namespace, has something below the path mounted.

    The nodes of a lab have the layers of their images mounted from here; removed under them, the next
    container started would find its files gone.
    """
    below = f"/{path.parent.name}/{path.name}/"
    for table in processes.glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):  # the process has ended
            if below in table.read_text(errors="replace"):
                return True
    return False


def sync_tree(path: Path) -> None:
    """Have the tree's file system write everything out, so that the rename never overtakes the content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a tree and make the copy writable: module caches may be read-only."""
    shutil.copytree(source, target, symlinks=True)
    for directory, _, names in os.walk(target):
        Path(directory).chmod(0o755)
        for name in names:
            file = Path(directory) / name
            if not file.is_symlink():
                file.chmod(0o755 if file.stat().st_mode & 0o111 else 0o644)
