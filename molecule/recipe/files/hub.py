"""A hub as Hugging Face's client sees one: repositories out of folders of this image, behind a token.

    python3 hub.py PORT model:org/name=/folder dataset:org/name=/folder ...

The token is in HUB_TOKEN. Every answer without it is 401.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDERS = {name: Path(folder) for name, folder in (word.split("=", 1) for word in sys.argv[2:])}


def files(folder: Path) -> list[str]:
    """The repository's files."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Hub(BaseHTTPRequestHandler):
    """The few requests that list and fetch a repository."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a body."""
        self.answer(body=True)

    def do_HEAD(self) -> None:
        """Answer with headers alone."""
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        """Find what is asked for."""
        if self.headers.get("Authorization") != f"Bearer {os.environ['HUB_TOKEN']}":
            self.reply(401, b'{"error": "Invalid credentials"}', body)
            return
        path = unquote(urlparse(self.path).path).strip("/").split("/")
        if path[0] == "api" and len(path) >= 4:
            kind, name, rest = path[1].rstrip("s"), "/".join(path[2:4]), path[4:]
            folder = FOLDERS.get(f"{kind}:{name}")
            if folder:
                self.reply(200, json.dumps(self.describe(name, folder, rest)).encode(), body)
                return
        kind = "dataset" if path[0] == "datasets" else "model"
        path = path[1:] if kind == "dataset" else path
        folder = FOLDERS.get(f"{kind}:{'/'.join(path[:2])}")
        if folder and path[2:3] == ["resolve"] and "/".join(path[4:]) in files(folder):
            self.reply(200, (folder / "/".join(path[4:])).read_bytes(), body)
            return
        self.reply(404, b'{"error": "Repository not found"}', body, {"X-Error-Code": "RepoNotFound"})

    @staticmethod
    def describe(name: str, folder: Path, rest: list[str]) -> object:
        """What the API says of a repository: its tree, or itself."""
        if rest[:1] == ["tree"]:
            return [
                {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": COMMIT}
                for file in files(folder)
            ]
        siblings = [{"rfilename": file} for file in files(folder)]
        return {"id": name, "sha": COMMIT, "private": True, "tags": [], "siblings": siblings}

    def reply(self, status: int, content: bytes, body: bool, more: dict[str, str] | None = None) -> None:
        """Send an answer."""
        self.send_response(status)
        headers = {
            "Content-Length": str(len(content)),
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',  # noqa: S324 - as git names contents
            "X-Repo-Commit": COMMIT,
            **(more or {}),
        }
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1])), Hub).serve_forever()
