"""Independent programs accept the files of deploy/: hadolint, yamllint, docker-compose, kubectl and
the schemas of Kubernetes.

`pip install 'octavo[deploy]'` installs the first two and the schemas, and Debian's package
`docker-compose` the third. A test whose program is missing is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.deployment import DEPLOY, ROOT, read

pytestmark = pytest.mark.slow
OVERLAYS = [".", "kubernetes/base", "kubernetes/cuda"]
CUSTOM = {"PodMonitor", "PrometheusRule"}  # The Prometheus Operator defines these kinds.


def run(*command: str) -> str:
    """Run a program, which lies beside the interpreter or on the path."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent))
    program = program or shutil.which(command[0])
    if program is None:
        pytest.skip(f"needs {command[0]}")
    result = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert run("hadolint", "deploy/Dockerfile") == ""


def test_yamllint_finds_nothing() -> None:
    assert run("yamllint", "--strict", "deploy", ".yamllint") == ""


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_docker_compose_accepts_the_files(files: list[str]) -> None:
    arguments = [part for file in files for part in ("--file", f"deploy/{file}")]
    found = yaml.safe_load(run("docker-compose", *arguments, "config"))
    assert set(found["services"]) == set(read("compose.yaml")["services"])
    images = {found["services"][f"worker-{number}"]["image"] for number in (1, 2)}
    assert images == {"octavo:cuda" if len(files) == 2 else "octavo:cpu"}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("folder", OVERLAYS)
def test_kubernetes_accepts_the_manifests(folder: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all(run("kubectl", "kustomize", str(DEPLOY / folder))))
    checked = [document for document in documents if document["kind"] not in CUSTOM]
    assert len(checked) >= 5
    for document in checked:
        validate.validate(document, version, strict=True)
