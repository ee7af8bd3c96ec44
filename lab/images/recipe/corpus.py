"""English text and questions with answers, out of the documentation strings of installed Python packages.

Nothing is imported but read: the strings are found in the source files' syntax trees. The same files give the
same texts and rows in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# A string with this many words is prose, whatever it is assigned to (numpy keeps many of its documentation
# strings in tables).
PROSE_WORDS = 25
ANSWER_WORDS = (5, 40)
# Parts of the standard library that are tests, demonstrations or programs rather than a library.
SKIPPED = frozenset(
    {"test", "tests", "testing", "idlelib", "lib2to3", "turtledemo", "ensurepip", "__pycache__", "__phello__"}
)


@dataclass(frozen=True)
class Row:
    """A question about one name of the standard library and the first sentence of its documentation."""

    question: str
    answer: str


def share(text: str, parts: int) -> int:
    """A number from 0 to parts - 1 that depends on the text alone; it settles what is held out."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % parts


def sources(root: Path, package: str = "") -> Iterator[tuple[str, Path]]:
    """Module name and source file of everything below a library directory, sorted, tests left out."""
    top = root / package if package else root
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED.isdisjoint(parts) and "dist-packages" not in parts and "site-packages" not in parts:
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def parsed(path: Path) -> ast.Module | None:
    """A file's syntax tree; None for one that is not Python 3 in UTF-8."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return None


def prose(tree: ast.Module) -> Iterator[str]:
    """Every string of a module that is long enough to be prose, in the order of the file."""
    found = [
        (node.lineno, node.col_offset, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for _, _, text in sorted(found):
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= PROSE_WORDS and text.isascii():
            yield inspect.cleandoc(text)


def texts(files: Iterable[tuple[str, Path]]) -> list[str]:
    """All prose of these files, each text once."""
    seen: dict[str, None] = {}
    for _, path in files:
        tree = parsed(path)
        for text in prose(tree) if tree else ():
            seen.setdefault(text)
    return list(seen)


def first_sentence(doc: str) -> str:
    """The first sentence of a documentation string, on one line; "" when it begins with something else."""
    paragraph = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
    found = re.match(r"([A-Z][^`|<>{}=*]*?[a-z\)\d'\"]\.)(?=\s|$)", paragraph)
    return found.group(1) if found else ""


def named(tree: ast.Module, module: str) -> Iterator[tuple[str, str, str]]:
    """(kind, dotted name, documentation string) of a module's public names."""
    own = ast.get_docstring(tree)
    if own:
        yield "module", module, own

    def visit(body: list[ast.stmt], path: str, inside_class: bool) -> Iterator[tuple[str, str, str]]:
        for node in body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if node.name.startswith("_"):
                continue
            name, doc = f"{path}.{node.name}", ast.get_docstring(node)
            a_class = isinstance(node, ast.ClassDef)
            if doc:
                yield ("class" if a_class else "method" if inside_class else "function"), name, doc
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, name, True)

    yield from visit(tree.body, module, False)


def rows(files: Iterable[tuple[str, Path]]) -> list[Row]:
    """Questions with answers about the names of these files; no answer comes twice."""
    low, high = ANSWER_WORDS
    answers: set[str] = set()
    found = []
    for module, path in files:
        if any(part.startswith("_") for part in module.split(".")):
            continue
        tree = parsed(path)
        for kind, name, doc in named(tree, module) if tree else ():
            answer = first_sentence(doc)
            if low <= len(answer.split()) <= high and answer.isascii() and answer not in answers:
                answers.add(answer)
                found.append(Row(f"What does the {kind} {name} do?", answer))
    return found


def split(found: Iterable[Row], parts: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out, one in `parts`."""
    train: list[Row] = []
    held: list[Row] = []
    for row in found:
        (train if share(row.answer, parts) else held).append(row)
    return train, held


def without_answers(found: Iterable[str], held: Iterable[Row]) -> list[str]:
    """The texts in which no held-out answer is said."""
    answers = [row.answer for row in held]
    return [text for text in found if not any(answer in " ".join(text.split()) for answer in answers)]
