"""Write OCI image archives without any image tool.

An archive holds one image for linux/amd64 with uncompressed layers, under a full reference that containerd's
import takes over. The same content always gives the same bytes: entries are sorted, owned by root and dated
1970, and no clock is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPOCH = "1970-01-01T00:00:00Z"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Entry:
    """One entry of a layer: a file copied from `source`, a symbolic link to `link`, or else a directory."""

    path: str
    source: Path | None = None
    link: str | None = None
    mode: int = 0o755


@dataclass(frozen=True)
class ImageConfig:
    """What a container runtime reads from an image. `user` is "uid:gid"; empty means root."""

    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"
    labels: Mapping[str, str] = field(default_factory=dict)


def write_layer(target: Path, entries: Sequence[Entry]) -> None:
    """Write a layer tar; leading directories are added. Raises ValueError on a path given twice."""
    wanted: dict[str, Entry] = {}
    for entry in entries:
        path = entry.path.strip("/")
        if path in wanted:
            raise ValueError(f"layer entry {entry.path} is given twice")
        wanted[path] = entry
    for path in list(wanted):
        for parent in Path(path).parents:
            if str(parent) != ".":
                wanted.setdefault(str(parent), Entry(str(parent)))
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as layer:
        for path in sorted(wanted):
            entry = wanted[path]
            info = tarfile.TarInfo(path)
            info.mode = entry.mode
            if entry.link is not None:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
                layer.addfile(info)
            elif entry.source is not None:
                info.size = entry.source.stat().st_size
                with entry.source.open("rb") as content:
                    layer.addfile(info, content)
            else:
                info.type = tarfile.DIRTYPE
                layer.addfile(info)


def write_archive(
    target: Path, reference: str, layers: Sequence[Path], config: ImageConfig, *, known: int = 0
) -> str:
    """Write an OCI archive of one image; returns the digest of its manifest ("sha256:...").

    The first `known` layers are named but left out, for stores that have them from another image.
    """
    descriptors = [_file_descriptor(LAYER_TYPE, layer) for layer in layers]
    config_blob = _json(_config(config, [str(one["digest"]) for one in descriptors]))
    manifest_blob = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _blob_descriptor(CONFIG_TYPE, config_blob),
            "layers": descriptors,
        }
    )
    manifest = _blob_descriptor(MANIFEST_TYPE, manifest_blob)
    index_entry = {
        **manifest,
        "platform": {"architecture": "amd64", "os": "linux"},
        "annotations": {
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
        },
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [index_entry]}
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json(index))
        for blob in (manifest_blob, config_blob):
            _add(archive, _blob_path(_digest(blob)), blob)
        for layer, descriptor in list(zip(layers, descriptors, strict=True))[known:]:
            info = tarfile.TarInfo(_blob_path(str(descriptor["digest"])))
            info.size, info.mode = layer.stat().st_size, 0o644
            with layer.open("rb") as content:
                archive.addfile(info, content)
    return str(manifest["digest"])


def _config(config: ImageConfig, diff_ids: Sequence[str]) -> dict[str, Any]:
    runtime: dict[str, Any] = {"WorkingDir": config.workdir}
    if config.entrypoint:
        runtime["Entrypoint"] = list(config.entrypoint)
    if config.cmd:
        runtime["Cmd"] = list(config.cmd)
    if config.env:
        runtime["Env"] = [f"{name}={value}" for name, value in sorted(config.env.items())]
    if config.user:
        runtime["User"] = config.user
    if config.labels:
        runtime["Labels"] = dict(config.labels)
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": EPOCH,
        "config": runtime,
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        "history": [{"created": EPOCH} for _ in diff_ids],
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _blob_descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _file_descriptor(media_type: str, path: Path) -> dict[str, Any]:
    with path.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": path.stat().st_size}


def _add(archive: tarfile.TarFile, name: str, blob: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(blob), 0o644
    archive.addfile(info, io.BytesIO(blob))
