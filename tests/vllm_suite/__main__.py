"""Runs vLLM's server tests: python -m tests.vllm_suite --source CLONE [FILE ...].

Each file runs in a process of its own, with servers of its own. The report is a line for each file
and each test that did not pass. `--json FILE` writes the outcome of every test, and the reason from
reasons.py; tests of other files that FILE already has are kept, so that the suite can run in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from octavo.bench.provenance import provenance, run_git
from tests.vllm_suite.chosen import SERVER_TESTS
from tests.vllm_suite.reasons import reason_of

SHIMS = Path(__file__).parent / "shims"
ROOT = Path(__file__).parents[2]
SECONDS = 120  # for one test
# Modules that tests decode or compare replies with: they run as they are.
HELPERS = (
    "tests/models/utils.py",
    "vllm/config/utils.py",
    "vllm/entrypoints/pooling/utils.py",
    "vllm/utils/serial_utils.py",
)
# Files whose tests need the model's whole context, and do not generate until it is full.
LONG_CONTEXT = ("test_chunked_prompt.py", "instrumentator/test_basic.py", "test_tokenization.py")
Outcome = tuple[str, str]  # "passed", "failed", "error" or "skipped", and why


def lay_out(source: Path, folder: Path) -> None:
    """Copy vLLM's tests of entry points, and put the shims beside them."""
    shutil.copytree(source / "tests" / "entrypoints", folder / "tests" / "entrypoints")
    (folder / "tests" / "__init__.py").touch()
    shutil.copy(SHIMS / "tests_utils.py", folder / "tests" / "utils.py")
    shutil.copy(SHIMS / "tests_conftest.py", folder / "tests" / "conftest.py")
    shutil.copy(SHIMS / "thinking.jinja", folder / "tests" / "thinking.jinja")
    for name in ("vllm_import.py", "vllm_command.py", "reply_records.py"):
        shutil.copy(SHIMS / name, folder / name)
    for name in HELPERS:
        path = folder / "helpers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, path)
    (folder / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = module\n"
        "asyncio_default_test_loop_scope = module\n"
    )


def run_file(folder: Path, file: str, options: list[str]) -> dict[str, Outcome]:
    """Return the outcome of each test of a file that applies."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "vllm_import", "-p", "no:cacheprovider"]
    quiet = ["-q", "--tb=line", f"--timeout={SECONDS}", f"--junitxml={report}"]
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command_file = folder / "bin" / "vllm"
    command_file.parent.mkdir(exist_ok=True)
    command_file.write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm_command "$@"\n')
    command_file.chmod(0o755)
    environment["PATH"] = f"{command_file.parent}{os.pathsep}{environment['PATH']}"
    if file.endswith(LONG_CONTEXT):
        environment["OCTAVO_SUITE_LONGEST"] = "8192"
    run = subprocess.run(
        [*command, *quiet, *options, file],
        cwd=folder,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if not report.exists():
        return {"(the whole file)": ("error", run.stdout[-300:])}
    return {case.get("name") or "?": outcome(case) for case in ET.parse(report).iter("testcase")}


def outcome(case: ET.Element) -> Outcome:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            word = "failed" if kind == "failure" else kind
            why = " ".join((found.get("message") or "").split())
            return word, why.replace(tempfile.gettempdir(), "TEMPORARY")[:300]
    return "passed", ""


def rows_of(file: str, found: dict[str, Outcome]) -> list[dict[str, str]]:
    rows = []
    for test, (word, why) in found.items():
        reason = reason_of(file, test) if word in ("failed", "error") else ""
        row = {"file": file, "test": test, "outcome": word, "why": why, "reason": reason}
        rows.append({name: text for name, text in row.items() if text})
    return rows


def write_result(path: Path, source: Path, rows: list[dict[str, str]]) -> None:
    """Write rows, and those that the file has of other test files. `partial` tells of such rows."""
    origin = provenance()
    origin["command"] = "python -m tests.vllm_suite --source CLONE"
    commit = run_git(source, "rev-parse", "--short=10", "HEAD")
    replaced = {row["file"] for row in rows}
    partial = not {*SERVER_TESTS} <= replaced
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [*(row for row in kept if row["file"] not in replaced), *rows]
    rows.sort(key=lambda row: row["file"])
    result = {"provenance": origin, "vllm_commit": commit, "partial": partial, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a clone of vLLM")
    parser.add_argument("--json", type=Path, help="a file for the outcome of every test")
    parser.add_argument("files", nargs="*", help="files below tests/entrypoints; default: chosen")
    known, options = parser.parse_known_args()
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="octavo-vllm-suite-") as name:
        lay_out(known.source, Path(name))
        for file in known.files or SERVER_TESTS:
            found = run_file(Path(name), f"tests/entrypoints/{file}", options)
            rows += rows_of(file, found)
            words = [word for word, _ in found.values()]
            print(f"{file}: {words.count('passed')} of {len(words)} passed", flush=True)
            for row in rows:
                if row["file"] == file and row["outcome"] != "passed":
                    print(f"    {row['outcome']} {row['test']}: {row.get('why')}", flush=True)
            if known.json is not None:
                write_result(known.json, known.source, rows)
    words = [row["outcome"] for row in rows]
    print(f"{words.count('passed')} of {len(words)} tests passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
