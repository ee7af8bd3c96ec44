"""The recipe's scripts that run in the pods, as far as they need neither torch nor LlamaFactory nor a hub."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in ("roles/smoke/files", "roles/recipe/files"):
    sys.path.insert(0, str(ROOT / folder))

initialize = importlib.import_module("initialize")
fine_tune = importlib.import_module("fine_tune")


def write(path, content=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def model(folder):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        write(folder / name, "{}")
    return folder


@pytest.fixture(name="workspace")
def workspace_fixture(tmp_path, monkeypatch):
    place = tmp_path / "workspace"
    place.mkdir()
    monkeypatch.setattr(initialize, "WORKSPACE", place)
    monkeypatch.setattr(initialize, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(fine_tune, "WORKSPACE", place)
    return place


def run(kind, uri, monkeypatch, capsys, *more):
    monkeypatch.setenv("STORAGE_URI", uri)
    status = initialize.main([kind, *more])
    return status, capsys.readouterr().out.splitlines()


class TestInitialize:
    def test_a_folder_of_the_image(self, workspace, tmp_path, monkeypatch, capsys):
        source = model(tmp_path / "opt/model")
        write(source / "sub/more.txt", "x")
        write(source / ".cache/hidden")
        status, lines = run("model", f"file://{source}", monkeypatch, capsys)
        assert (status, lines[-1]) == (0, "model-initializer: OK")
        names = {
            str(p.relative_to(workspace / "model")) for p in (workspace / "model").rglob("*") if p.is_file()
        }
        assert names == {"config.json", "tokenizer.json", "model.safetensors", "sub/more.txt"}
        assert fine_tune.source_note("model") == f"file://{source}"

    def test_a_second_time_nothing_is_fetched(self, workspace, tmp_path, monkeypatch, capsys):
        source = model(tmp_path / "model")
        run("model", f"file://{source}", monkeypatch, capsys)
        (source / "config.json").unlink()
        status, lines = run("model", f"file://{source}", monkeypatch, capsys)
        assert status == 0
        assert "there already" in lines[-2]

    def test_what_went_missing_is_fetched_again(self, workspace, tmp_path, monkeypatch, capsys):
        source = model(tmp_path / "model")
        run("model", f"file://{source}", monkeypatch, capsys)
        (workspace / "model/config.json").unlink()
        status, _ = run("model", f"file://{source}", monkeypatch, capsys)
        assert status == 0
        assert (workspace / "model/config.json").exists()

    def test_another_source_takes_its_place(self, workspace, tmp_path, monkeypatch, capsys):
        one, other = model(tmp_path / "one"), model(tmp_path / "other")
        write(one / "old.txt", "x")
        run("model", f"file://{one}", monkeypatch, capsys)
        status, lines = run("model", f"file://{other}", monkeypatch, capsys)
        assert status == 0
        assert not (workspace / "model/old.txt").exists()
        assert f"held file://{one}, making room for file://{other}" in lines[0]

    def test_files_of_others_stay(self, workspace, tmp_path, monkeypatch, capsys):
        write(workspace / "model/precious.txt", "x")
        status, lines = run("model", f"file://{model(tmp_path / 'one')}", monkeypatch, capsys)
        assert status == 1
        assert "no initializer put there" in lines[-1]
        assert (workspace / "model/precious.txt").exists()

    def test_a_folder_of_another_volume(self, workspace, tmp_path, monkeypatch, capsys):
        write(tmp_path / "source/dataset/team/train.jsonl", "{}")
        status, _ = run("dataset", "pvc://data/team", monkeypatch, capsys)
        assert status == 0
        assert (workspace / "dataset/train.jsonl").exists()

    def test_one_file_of_a_data_set(self, workspace, tmp_path, monkeypatch, capsys):
        write(tmp_path / "rows.json", [{}])
        assert run("dataset", f"file://{tmp_path}/rows.json", monkeypatch, capsys)[0] == 0
        assert (workspace / "dataset/rows.json").exists()

    @pytest.mark.parametrize(
        ("uri", "message"),
        [
            ("", "found STORAGE_URI ''; needed hf://org/name"),
            ("s3://x/y", "needed hf://org/name"),
            ("file:///no/such/folder", "found no /no/such/folder (/ holds "),
            ("pvc://data/none", "found no "),
        ],
    )
    @pytest.mark.usefixtures("workspace")
    def test_what_is_not_there(self, monkeypatch, capsys, uri, message):
        status, lines = run("dataset", uri, monkeypatch, capsys)
        assert status == 1
        assert lines[-1].startswith("dataset-initializer: FAILED: ")
        assert message in lines[-1]
        assert "\n" not in lines[-1]

    def test_half_a_model(self, workspace, tmp_path, monkeypatch, capsys):
        write(tmp_path / "half/config.json", "{}")
        status, lines = run("model", f"file://{tmp_path}/half", monkeypatch, capsys)
        assert status == 1
        assert "needed besides: a tokenizer, weights (*.safetensors)" in lines[-1]
        # And the next attempt does not take it for whole.
        assert not initialize.read_note(workspace / "model").get("complete")

    def test_no_rows(self, workspace, tmp_path, monkeypatch, capsys):
        write(tmp_path / "d/README.md", "x")
        status, lines = run("dataset", f"file://{tmp_path}/d", monkeypatch, capsys)
        assert status == 1
        assert "needed a file of .json, .jsonl, .csv, .parquet" in lines[-1]

    def test_room_for_trainers_own_program(self, workspace, tmp_path, monkeypatch, capsys):
        one = model(tmp_path / "one")
        run("model", f"file://{one}", monkeypatch, capsys)
        status, _ = run("model", "hf://org/name", monkeypatch, capsys, "--only-prepare")
        assert status == 0
        assert list((workspace / "model").iterdir()) == []

    def test_a_hub(self, workspace, monkeypatch, capsys):
        asked = {}

        class Api:
            def __init__(self, token):
                asked["token"] = token

            def list_repo_files(self, name):
                asked["listed"] = name
                return ["model.safetensors", "pytorch_model.bin"]

        def snapshot_download(**given):
            asked.update(given)
            model(Path(given["local_dir"]))

        hub = types.SimpleNamespace(HfApi=Api, snapshot_download=snapshot_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.setenv("ACCESS_TOKEN", "hf_secret")
        status, lines = run("model", "hf://org/name", monkeypatch, capsys)
        assert status == 0
        assert (asked["repo_id"], asked["repo_type"], asked["token"]) == ("org/name", "model", "hf_secret")
        # Old weights need not be fetched beside safetensors.
        assert "*.bin" not in asked["allow_patterns"]
        assert "hf_secret" not in "\n".join(lines)

    @pytest.mark.parametrize(("status", "tries"), [(401, 1), (404, 1), (503, 3), (None, 3)])
    def test_only_what_may_pass_is_tried_again(self, monkeypatch, status, tries):
        asked, slept = [], []
        monkeypatch.setattr(initialize.time, "sleep", slept.append)

        class HubError(RuntimeError):
            response = types.SimpleNamespace(status_code=status)

        def fetch():
            asked.append(1)
            raise HubError("no")

        with pytest.raises(initialize.InitializeError, match="did not give org/x: HubError: no"):
            initialize.persist("org/x", fetch)
        assert len(asked) == tries
        assert slept == list(initialize.PAUSES)[: tries - 1]

    def test_a_second_try_can_do(self, monkeypatch):
        monkeypatch.setattr(initialize.time, "sleep", lambda _: None)
        asked = []

        def fetch():
            asked.append(1)
            if len(asked) < 2:
                raise RuntimeError("no route")

        initialize.persist("org/x", fetch)
        assert len(asked) == 2

    def test_a_hub_that_refuses(self, workspace, monkeypatch, capsys):
        def snapshot_download(**_):
            raise RuntimeError("404 Client Error\nRepository Not Found")

        monkeypatch.setattr(initialize, "PAUSES", ())
        hub = types.SimpleNamespace(snapshot_download=snapshot_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        status, lines = run("dataset", "hf://org/none", monkeypatch, capsys)
        assert status == 1
        assert (
            "the hub did not give org/none: RuntimeError: 404 Client Error Repository Not Found" in lines[-1]
        )
        assert "recipe_hf_token_secret" in lines[-1]

    def test_a_volume_that_cannot_be_written(self, tmp_path, monkeypatch, capsys):
        write(tmp_path / "file")
        monkeypatch.setattr(initialize, "WORKSPACE", tmp_path / "file")
        status, lines = run("model", f"file://{model(tmp_path / 'm')}", monkeypatch, capsys)
        assert status == 1
        assert "and a volume that it can write, with enough room" in lines[-1]

    def test_a_full_volume_is_emptied_before_anything_is_written(
        self, workspace, tmp_path, monkeypatch, capsys
    ):
        run("model", f"file://{model(tmp_path / 'first')}", monkeypatch, capsys)
        written = initialize.write_note

        def no_room_beside(folder, note):
            if folder.exists() and not note["complete"]:
                raise OSError(28, "No space left on device")
            written(folder, note)

        monkeypatch.setattr(initialize, "write_note", no_room_beside)
        status, lines = run("model", f"file://{model(tmp_path / 'second')}", monkeypatch, capsys)
        assert (status, lines[-1]) == (0, "model-initializer: OK")
        assert initialize.read_note(workspace / "model")["uri"].endswith("second")


class TestFiles:
    @pytest.mark.parametrize(
        ("names", "train", "held"),
        [
            (["train.json", "held_out.json", "dataset_info.json"], ["train.json"], ["held_out.json"]),
            (
                ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
                ["data/train-00000-of-00001.parquet"],
                ["data/test-00000-of-00001.parquet"],
            ),
            (["alpaca.json"], ["alpaca.json"], []),
            (["a.jsonl", "b.jsonl", "validation.jsonl"], ["a.jsonl", "b.jsonl"], ["validation.jsonl"]),
            (["contest.json", "latest.json"], ["contest.json", "latest.json"], []),
            (["train.json", "other.json"], ["train.json"], []),
        ],
    )
    def test_names_decide(self, tmp_path, names, train, held):
        for name in names:
            write(tmp_path / name, "[]")
        found = fine_tune.choose_files(tmp_path, {})
        assert [[str(p.relative_to(tmp_path)) for p in part] for part in found] == [train, held]

    def test_patterns_decide(self, tmp_path):
        for name in ("a.json", "b.json", "c.json"):
            write(tmp_path / name, "[]")
        train, held = fine_tune.choose_files(tmp_path, {"held_out": "b.*"})
        assert ([p.name for p in train], [p.name for p in held]) == (["a.json", "c.json"], ["b.json"])
        train, held = fine_tune.choose_files(tmp_path, {"train": "a.*"})
        assert ([p.name for p in train], held) == (["a.json"], [])

    def test_a_pattern_that_matches_nothing(self, tmp_path):
        write(tmp_path / "a.json", "[]")
        with pytest.raises(
            fine_tune.RecipeError, match=r"none of them matches z\.\*; needed a file for held_out"
        ):
            fine_tune.choose_files(tmp_path, {"held_out": "z.*"})

    def test_no_file(self, tmp_path):
        write(tmp_path / "README.md")
        with pytest.raises(fine_tune.RecipeError, match="found no file in the data set"):
            fine_tune.choose_files(tmp_path, {})


class TestRows:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.json", '[{"x": "1"}, {"x": "2"}]'),
            ("a.jsonl", '{"x": "1"}\n\n{"x": "2"}\n'),
            ("a.json", '{"x": "1"}\n{"x": "2"}\n'),
            ("a.csv", "x\n1\n2\n"),
        ],
    )
    def test_formats(self, tmp_path, name, text):
        write(tmp_path / name, text)
        assert fine_tune.rows_of(tmp_path / name) == [{"x": "1"}, {"x": "2"}]

    @pytest.mark.parametrize(
        ("text", "message"), [("nonsense", "neither JSON"), ("[1, 2]", "no list of objects")]
    )
    def test_no_rows(self, tmp_path, text, message):
        write(tmp_path / "a.json", text)
        with pytest.raises(fine_tune.RecipeError, match=message):
            fine_tune.rows_of(tmp_path / "a.json")

    @pytest.mark.parametrize(
        ("row", "formatting", "columns"),
        [
            (
                {"instruction": "", "input": "", "output": ""},
                "alpaca",
                {"prompt": "instruction", "query": "input", "response": "output"},
            ),
            ({"prompt": "", "completion": ""}, "alpaca", {"prompt": "prompt", "response": "completion"}),
            ({"question": "", "answer": ""}, "alpaca", {"prompt": "question", "response": "answer"}),
            ({"input": "", "output": ""}, "alpaca", {"prompt": "input", "response": "output"}),
            ({"messages": [{"role": "user", "content": ""}]}, "sharegpt", {"messages": "messages"}),
            ({"conversations": [{"from": "human", "value": ""}]}, "sharegpt", {"messages": "conversations"}),
        ],
    )
    def test_columns(self, row, formatting, columns):
        made = fine_tune.describe(row)
        assert (made["formatting"], made["columns"]) == (formatting, columns)
        assert ("tags" in made) is ("messages" in row)

    def test_other_columns(self):
        with pytest.raises(fine_tune.RecipeError, match="found rows with the columns text; needed"):
            fine_tune.describe({"text": "x"})


ROWS = [{"instruction": str(n), "output": "y"} for n in range(100)]


class TestOddFiles:
    """What real data sets hold."""

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            ("a.jsonl", '{"a": "x\u2028y"}\n{"a": "z\x85"}\n', ["x\u2028y", "z\x85"]),
            ("a.jsonl", '\ufeff{"a": "x"}\r\n', ["x"]),
            ("a.csv", 'a\n"x\ny"\n', ["x\ny"]),
            ("a.csv", "a\n" + "x" * 200_000 + "\n", ["x" * 200_000]),
        ],
        ids=["separators", "mark", "lines", "long"],
    )
    def test_rows_are_read_as_they_are(self, tmp_path, name, content, expected):
        (tmp_path / name).write_bytes(content.encode())
        assert [row["a"] for row in fine_tune.rows_of(tmp_path / name)] == expected

    def test_another_encoding_is_told(self, tmp_path):
        (tmp_path / "a.json").write_bytes(b'{"a": "\xe9"}')
        with pytest.raises(fine_tune.RecipeError, match="not in UTF-8"):
            fine_tune.rows_of(tmp_path / "a.json")


class TestSplit:
    def test_a_tenth_is_held_out(self):
        train, held, dropped = fine_tune.split(ROWS, [], 64, 1)
        assert (len(train), len(held), dropped) == (90, 10, 0)
        assert not {r["instruction"] for r in train} & {r["instruction"] for r in held}

    def test_the_seed_decides(self):
        one, same, other = (fine_tune.split(ROWS, [], 64, seed)[1] for seed in (1, 1, 2))
        assert one == same
        assert one != other

    def test_rows_of_both_are_not_trained_on(self):
        train, held, dropped = fine_tune.split(ROWS, ROWS[:5], 64, 1)
        assert (len(train), len(held), dropped) == (95, 5, 5)

    def test_double_rows_do_not_slip_through(self):
        rows = ROWS + ROWS[::-1]
        train, held, dropped = fine_tune.split(rows, [], 20, 1)
        keys = {fine_tune.key_of(row) for row in held}
        assert not any(fine_tune.key_of(row) in keys for row in train)
        assert dropped > 0

    def test_no_more_than_wanted(self):
        assert len(fine_tune.split(ROWS, ROWS[50:], 7, 1)[1]) == 7

    def test_too_few(self):
        with pytest.raises(fine_tune.RecipeError, match="found 9 rows; needed at least 10"):
            fine_tune.split(ROWS[:9], [], 64, 1)
        with pytest.raises(fine_tune.RecipeError, match="found no row to train on"):
            fine_tune.split(ROWS[:5], ROWS[:5], 64, 1)


SETTINGS = {"held_out_rows": 5, "seed": 1, "dataset_files": {}, "dataset_format": {}}


class TestPrepareData:
    def test_what_llamafactory_reads(self, tmp_path, capsys):
        write(tmp_path / "in/rows.json", ROWS)
        counts = fine_tune.prepare_data(tmp_path / "in", tmp_path / "out", SETTINGS)
        assert counts == {"rows_train": 95, "rows_held_out": 5, "rows_dropped": 0}
        info = json.loads((tmp_path / "out/dataset_info.json").read_text())
        assert info["held_out"] == {
            "file_name": "held_out.jsonl",
            "formatting": "alpaca",
            "columns": {"prompt": "instruction", "response": "output"},
        }
        assert len((tmp_path / "out/train.jsonl").read_text().splitlines()) == 95
        assert "95 rows to train on, 5 held out (seed 1)" in capsys.readouterr().out

    def test_the_registry_of_the_data_set_is_obeyed(self, tmp_path):
        write(tmp_path / "in/rows.json", [{"q": str(n), "a": "x"} for n in range(20)])
        write(
            tmp_path / "in/dataset_info.json",
            {"mine": {"file_name": "rows.json", "columns": {"prompt": "q", "response": "a"}, "subset": "z"}},
        )
        fine_tune.prepare_data(tmp_path / "in", tmp_path / "out", SETTINGS)
        info = json.loads((tmp_path / "out/dataset_info.json").read_text())
        assert info["train"] == {"file_name": "train.jsonl", "columns": {"prompt": "q", "response": "a"}}

    def test_the_user_has_the_last_word(self, tmp_path):
        write(tmp_path / "in/rows.json", ROWS)
        wish = {**SETTINGS, "dataset_format": {"columns": {"prompt": "output", "response": "instruction"}}}
        fine_tune.prepare_data(tmp_path / "in", tmp_path / "out", wish)
        info = json.loads((tmp_path / "out/dataset_info.json").read_text())
        assert info["train"]["columns"]["prompt"] == "output"

    def test_no_data_set(self, tmp_path):
        with pytest.raises(fine_tune.RecipeError, match="read its log"):
            fine_tune.prepare_data(tmp_path / "none", tmp_path / "out", SETTINGS)


class TestTraining:
    @pytest.mark.parametrize(
        ("config", "backend", "bf16", "made"),
        [
            ({}, "cuda", True, {"bf16": True}),
            ({}, "cuda", False, {"fp16": True}),
            ({"fp16": True}, "cuda", True, {"fp16": True}),
            ({"bf16": False}, "cuda", True, {"bf16": False}),
            ({"bf16": True, "lora_rank": 8}, "cpu", False, {"lora_rank": 8}),
            ({}, "cpu", False, {}),
        ],
    )
    def test_precision(self, config, backend, bf16, made):
        assert fine_tune.precision(config, backend, bf16) == made

    @pytest.mark.parametrize(
        ("status", "last", "message"),
        [
            (1, ["torch.cuda.OutOfMemoryError: CUDA out of memory."], "needed a larger slice"),
            (-9, [], "killed by signal 9"),
            (1, ["Traceback", "ValueError: no template x", "end"], "status 1: ValueError: no template x"),
            (1, ["RecipeError: found 2 CUDA devices; needed one"], "found 2 CUDA devices"),
            (3, [], "status 3: nothing"),
        ],
    )
    def test_why_it_ended(self, status, last, message):
        assert message in fine_tune.failure("train", status, last)

    def test_adapter_files(self, tmp_path):
        with pytest.raises(fine_tune.RecipeError, match="found nothing in"):
            fine_tune.adapter_files(tmp_path)
        write(tmp_path / "adapter_model.safetensors", "weights")
        write(tmp_path / "adapter_config.json", "{}")
        write(tmp_path / "README.md", "x")
        names = {file["name"]: file for file in fine_tune.adapter_files(tmp_path)}
        assert set(names) == {"adapter_model.safetensors", "adapter_config.json"}
        assert names["adapter_model.safetensors"]["bytes"] == 7
        assert len(names["adapter_model.safetensors"]["sha256"]) == 64

    def test_losses_of_the_trainer(self, tmp_path):
        write(
            tmp_path / "adapter/trainer_state.json",
            {
                "global_step": 120,
                "log_history": [{"loss": 5.0}, {"eval_loss": 1}, {"loss": 4.0}, {"train_loss": 4.5}],
            },
        )
        assert fine_tune.training_losses(tmp_path) == {
            "steps": 120,
            "train_loss_first": 5.0,
            "train_loss_last": 4.0,
        }

    def test_a_part_runs_in_a_process_of_its_own(self, tmp_path, monkeypatch, capsys):
        script = tmp_path / "part.py"
        write(
            script,
            "import json, pathlib, sys\nprint('10%\\r100% done')\n"
            "pathlib.Path(sys.argv[4], 'train.json').write_text(json.dumps({'a': 1}))\n",
        )
        monkeypatch.setattr(fine_tune, "__file__", str(script))
        assert fine_tune.start("train", tmp_path) == {"a": 1}
        assert capsys.readouterr().out == "100% done\n"

    def test_a_part_that_ends_well_and_says_nothing_is_no_proof(self, tmp_path, monkeypatch):
        write(tmp_path / "part.py", "print('bye')")
        write(tmp_path / "train.json", {"old": True})
        monkeypatch.setattr(fine_tune, "__file__", str(tmp_path / "part.py"))
        with pytest.raises(fine_tune.RecipeError, match="train ended with status 0: bye"):
            fine_tune.start("train", tmp_path)


DEVICE = {"memory_bytes": 100}


class TestProof:
    def test_it_must_have_learned(self):
        proof = {"loss_before": 5.0, "loss_after": 4.0, "loss_factor": 0.9, "peak_bytes": 50}
        fine_tune.check_proof(proof, DEVICE)
        for after in (4.51, 5.0, float("nan")):
            with pytest.raises(fine_tune.RecipeError, match=r"needed at most 4\.5000"):
                fine_tune.check_proof({**proof, "loss_after": after}, DEVICE)
        with pytest.raises(fine_tune.RecipeError, match="needed at most the slice's"):
            fine_tune.check_proof({**proof, "peak_bytes": 101}, DEVICE)

    def test_where_files_are_is_said_in_the_pod(self, tmp_path, monkeypatch):
        yaml = pytest.importorskip("yaml")
        monkeypatch.setattr(fine_tune, "HERE", tmp_path)
        write(tmp_path / "training.yaml", "stage: sft\nlora_rank: 8\n")
        (tmp_path / "run").mkdir()
        fine_tune.write_training(tmp_path / "run")
        made = yaml.safe_load((tmp_path / "run/training.yaml").read_text())
        assert made == {
            "stage": "sft",
            "lora_rank": 8,
            "model_name_or_path": "/workspace/model",
            "dataset_dir": f"{tmp_path}/run/data",
            "dataset": "train",
            "output_dir": f"{tmp_path}/run/adapter",
        }


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["initialize.py", "model"], "model-initializer: FAILED: found STORAGE_URI ''"),
        (["fine_tune.py"], "LlamaFactory LoRA SFT on GPU slice: FAILED: "),
    ],
)
def test_without_what_they_need_they_end_with_the_reason(words, last):
    done = subprocess.run(
        [sys.executable, str(ROOT / "roles/recipe/files" / words[0]), *words[1:]],
        env={"PYTHONPATH": str(ROOT / "roles/smoke/files"), "PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(last)
    assert done.stderr == ""
