"""What is checked in beside its source comes out of it again: the compiled pipeline, Volcano's types."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from lab.build.programs import go_environment

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/callers/files"
VOLCANO = ROOT / "lab/volcano"
# What pip and go say where the package index or the module proxy cannot be reached at all.
_UNREACHED = (
    *("NewConnectionError", "Name or service not known", "Temporary failure in name resolution"),
    *("Connection refused", "Network is unreachable", "dial tcp", "ConnectTimeoutError"),
)


def told(command: list[str], **options: object) -> str:
    """What a command prints; skips where it could not fetch what it needs."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)  # type: ignore[call-overload]
    if done.returncode and any(sign in done.stderr for sign in _UNREACHED):
        pytest.skip(f"{command[0]}: the package index cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


class TestPipeline:
    def test_it_compiles_to_the_file_that_is_checked_in(self, tmp_path: Path) -> None:
        out = tmp_path / "pipeline.yaml"
        told([str(ROOT / "scripts/env"), "kfp", "python", str(FILES / "pipeline.py"), str(out)])
        assert out.read_bytes() == (FILES / "pipeline.yaml").read_bytes(), (
            "compile it again: scripts/env kfp python roles/callers/files/pipeline.py "
            "roles/callers/files/pipeline.yaml"
        )

    def test_the_message_of_this_kfp_has_no_field_for_claims(self) -> None:
        """If this fails, kfp-kubernetes knows claims: use its add_resource_claim_json in pipeline.py."""
        platform = list(yaml.safe_load_all((FILES / "pipeline.yaml").read_text()))[1]["platforms"]
        executor = platform["kubernetes"]["deploymentSpec"]["executors"]["exec-prove"]
        code = (
            "import json, sys\n"
            "from google.protobuf import json_format\n"
            "from kfp.kubernetes import kubernetes_executor_config_pb2 as pb\n"
            "given = json.loads(sys.argv[1])\n"
            "try:\n"
            "    json_format.ParseDict(given, pb.KubernetesExecutorConfig())\n"
            "    print('taken')\n"
            "except json_format.ParseError as fault:\n"
            "    print(fault)\n"
            "del given['podResourceClaims']\n"
            "json_format.ParseDict(given, pb.KubernetesExecutorConfig())\n"
            "print('taken without')\n"
        )
        lines = told(
            [str(ROOT / "scripts/env"), "kfp", "python", "-c", code, json.dumps(executor)]
        ).splitlines()
        assert 'has no field named "podResourceClaims"' in lines[0]
        assert lines[-1] == "taken without"

    def test_the_lock_and_the_file_name_the_same_kfp(self) -> None:
        locked = (ROOT / "requirements/kfp.txt").read_text().split()
        pipeline = next(yaml.safe_load_all((FILES / "pipeline.yaml").read_text()))
        assert pipeline["sdkVersion"].replace("kfp-", "kfp==") in locked
        assert "kfp-kubernetes==2.17.3" in locked


def volcano(mode: str, text: str = "") -> str:
    cache = Path(told([str(ROOT / "scripts/env"), "site"]).strip()).parents[1]
    return told(["go", "run", ".", mode], cwd=VOLCANO, env=go_environment(cache), input=text)


@pytest.mark.skipif(shutil.which("go") is None, reason="there is no Go; lab/build asks for one")
class TestVolcano:
    def test_the_schema_is_made_of_the_types(self) -> None:
        assert volcano("schema") == (FILES / "volcano-job.json").read_text(), (
            "make it again: (cd lab/volcano && go run . schema) > roles/callers/files/volcano-job.json"
        )

    def test_the_types_themselves_take_the_job(self) -> None:
        from tests.render.conftest import render  # noqa: PLC0415 - loads Ansible

        made = render(
            "callers",
            callers_enabled=["volcano"],
            __callers_cluster={"facts": {"apis": {"groups": {"batch.volcano.sh": ["v1alpha1"]}}}},
        )
        told_claims = json.loads(volcano("check", json.dumps(made[-1])))
        assert told_claims == {
            "task": "slice",
            "resourceClaims": [
                {"name": "gpu-slice", "resourceClaimTemplateName": "gpu-slices-mig-1g-6gb"},
            ],
            "claims": [[{"name": "gpu-slice"}]],
        }

    def test_the_types_refuse_an_unknown_field(self) -> None:
        text = json.dumps({"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "spec": {"task": []}})
        with pytest.raises(AssertionError, match=r'unknown field "spec\.task"'):
            volcano("check", text)
