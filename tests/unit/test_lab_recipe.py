"""The recipe's image: what its texts and questions are made of, and how its layers are put together."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import tarfile
from pathlib import Path

import pytest

from lab.build.images import REFERENCES
from lab.build.oci import Entry, ImageConfig, write_archive, write_layer
from lab.build.process import BuildError
from lab.build.recipe import TORCH_FAULT, TORCH_REMEDY, drop_tests, mend, tree

REPO = Path(__file__).resolve().parents[2]
FILES = REPO / "lab" / "images" / "recipe"


def load_corpus():
    """The corpus module, which lies beside the script that uses it in the image."""
    spec = importlib.util.spec_from_file_location("recipe_corpus", FILES / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


corpus = load_corpus()

LONG = (
    "Walk over the tree of a directory from the top and hand out every folder that lies in it, together "
    "with the names of its files, so that the caller may leave out what it has no use for."
)
LIBRARY = {
    "walker.py": f'''
"""Tools that walk over trees of folders."""

TABLE = {{"walk": """{LONG}"""}}


def walk(top):
    """Hand out every folder below the top one.

    And more of it.
    """


def _hidden(top):
    """Nobody is asked about private names here."""


def copied(top):
    """Hand out every folder below the top one."""


class Walker:
    """A walker that remembers where it has been."""

    def step(self):
        """Go one folder further and return its name."""

        def inner():
            """Nested functions have no dotted name to ask for."""
''',
    "package/__init__.py": '"""A package of several tools for folders."""\n',
    "package/tests/test_walker.py": '"""Tests are no library and are left out."""\n',
    "broken.py": "print 'Python 2'\n",
    "_private.py": '"""A private module that nobody asks about."""\n',
}


@pytest.fixture
def library(tmp_path):
    for name, text in LIBRARY.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


# --- texts and questions ----------------------------------------------------------------------------------


def test_sources_are_sorted_and_without_tests(library):
    assert [name for name, _ in corpus.sources(library)] == ["_private", "broken", "package", "walker"]
    assert [name for name, _ in corpus.sources(library, "package")] == ["package"]


@pytest.mark.parametrize(
    ("doc", "sentence"),
    [
        ("Return the name of a file.", "Return the name of a file."),
        ("Return the name\n    of a file.  Or its number.", "Return the name of a file."),
        ("Return a file (or None).\n\nMore.", "Return a file (or None)."),
        ("Read from version 3.11 of it. More.", "Read from version 3.11 of it."),
        ("return the name of a file.", ""),
        ("A heading without an end\n\nText.", ""),
        ("walk(top) -> iterator of folders.", ""),
        ("Use ``name`` here.", ""),
        ("", ""),
    ],
)
def test_first_sentence(doc, sentence):
    assert corpus.first_sentence(doc) == sentence


def test_rows_ask_about_public_names_and_no_answer_comes_twice(library):
    found = corpus.rows(corpus.sources(library))
    assert [(row.question, row.answer) for row in found] == [
        ("What does the module package do?", "A package of several tools for folders."),
        ("What does the module walker do?", "Tools that walk over trees of folders."),
        ("What does the function walker.walk do?", "Hand out every folder below the top one."),
        ("What does the class walker.Walker do?", "A walker that remembers where it has been."),
        ("What does the method walker.Walker.step do?", "Go one folder further and return its name."),
    ]


def test_prose_is_any_long_string(library):
    tree_of_file = ast.parse((library / "walker.py").read_text())
    assert list(corpus.prose(tree_of_file)) == [LONG]
    assert corpus.texts([*corpus.sources(library), *corpus.sources(library)]) == [LONG]


def test_held_out_rows_depend_on_their_answers_alone():
    rows = [corpus.Row(f"What does {number} do?", f"Return number {number}.") for number in range(500)]
    train, held = corpus.split(rows, 10)
    assert sorted([*train, *held], key=rows.index) == rows
    assert 25 < len(held) < 80
    again = corpus.split([corpus.Row("Another question?", row.answer) for row in reversed(rows)], 10)
    assert {row.answer for row in again[1]} == {row.answer for row in held}


def test_texts_that_say_a_held_out_answer_go():
    held = [corpus.Row("What does x do?", "Return the name of a file.")]
    texts = ["Intro.\n\nReturn the name\n  of a file. More.", "Return the name of a folder."]
    assert corpus.without_answers(texts, held) == ["Return the name of a folder."]


def test_the_standard_library_gives_hundreds_of_rows():
    found = corpus.rows(corpus.sources(Path(ast.__file__).parent))
    train, held = corpus.split(found, 10)
    assert len(train) > 1500
    assert len(held) > 150
    assert not {row.answer for row in train} & {row.answer for row in held}
    assert "What does the function shutil.copytree do?" in {row.question for row in found}


# --- layers -----------------------------------------------------------------------------------------------


def test_tree_is_readable_by_everybody_and_keeps_links(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "run").chmod(0o700)
    (tmp_path / "weights").write_text("x")
    (tmp_path / "weights").chmod(0o600)
    (tmp_path / "latest").symlink_to("weights")
    assert tree(tmp_path, "opt/lab") == [
        Entry("opt/lab/bin/run", tmp_path / "bin" / "run", mode=0o755),
        Entry("opt/lab/latest", link="weights"),
        Entry("opt/lab/weights", tmp_path / "weights", mode=0o644),
    ]


def test_mending_changes_one_line_and_refuses_any_other_file(tmp_path):
    file = tmp_path / "metadata.py"
    file.write_text(f"    tensor_properties: TensorProperties = {TORCH_FAULT}\n")
    mend(file, TORCH_FAULT, TORCH_REMEDY)
    assert (
        file.read_text()
        == "    tensor_properties: TensorProperties = field(default_factory=TensorProperties)\n"
    )
    with pytest.raises(BuildError, match=r"metadata\.py has .* 0 times, needed once"):
        mend(file, TORCH_FAULT, TORCH_REMEDY)


def test_test_suites_of_wheels_go_and_nothing_else(tmp_path):
    for path in ("pandas/tests/io/tests/x.py", "pandas/core/x.py", "llamafactory/tests/x.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("")
    drop_tests(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    assert left == {"pandas/core/x.py", "llamafactory/tests/x.py"}


def test_known_layers_are_named_but_left_out(tmp_path):
    layers = []
    for name in ("base", "own"):
        layers.append(tmp_path / f"{name}.tar")
        write_layer(layers[-1], [Entry(name)])
    digests = {
        known: write_archive(
            tmp_path / f"{known}.tar", "docker.io/lab/x:1", layers, ImageConfig(), known=known
        )
        for known in (0, 1)
    }
    assert digests[0] == digests[1]
    names = {}
    for known in digests:
        with tarfile.open(tmp_path / f"{known}.tar") as archive:
            names[known] = set(archive.getnames())
            index = json.load(archive.extractfile("index.json"))
            digest = index["manifests"][0]["digest"].replace(":", "/")
            manifest = json.load(archive.extractfile(f"blobs/{digest}"))
    base, own = (f"blobs/{layer['digest'].replace(':', '/')}" for layer in manifest["layers"])
    assert names[0] - names[1] == {base}
    assert own in names[1]


def test_image_whose_layer_is_left_out_comes_after_the_one_that_brings_it():
    order = list(REFERENCES)
    assert order.index("train") < order.index("llamafactory")


# --- pins -------------------------------------------------------------------------------------------------


def test_every_wheel_is_pinned_and_hashed():
    text = re.sub(r"^#.*\n", "", (FILES / "requirements.txt").read_text(), flags=re.MULTILINE)
    wheels = re.findall(r"^([a-z0-9-_]+)==([0-9.]+) \\\n    --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert len(wheels) == text.count("==") == len(dict(wheels))
    pins = dict(wheels)
    assert REFERENCES["llamafactory"].endswith(f":{pins['llamafactory']}")
    # What LlamaFactory 0.9.1 itself refuses to run without.
    assert (pins["transformers"], pins["peft"], pins["trl"], pins["datasets"]) == (
        "4.46.1",
        "0.12.0",
        "0.9.6",
        "3.1.0",
    )
