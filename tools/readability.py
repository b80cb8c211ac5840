"""Counts how dense the code is, and fails where it is denser than the limits below.

    python tools/readability.py [--by-folder]

A code line is a line on which a token begins. Tokens are Python's NAME, OP, NUMBER and STRING
tokens. Generated files are left out. Kernels may be longer and take more parameters than other
functions, because Triton and numba pass every tensor, stride and size as a parameter.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNTED_TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
LINE_LENGTH = 100
FUNCTION_LINES = 60
FUNCTION_PARAMETERS = 7
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
KERNEL_FOLDERS = ("octavo/ops/triton/", "octavo/ops/cpu/jit/")

# What the tree must keep. A change may tighten these limits and must not loosen them.
MAX_TOKENS_PER_LINE = 8.0
MAX_TUPLE_ASSIGNMENTS = 4.0  # per 1,000 code lines
MAX_LONG_LINES = 0.0  # percent of lines over LINE_LENGTH columns
MIN_NAME_LENGTH = 6.0  # mean length of NAME tokens
MAX_LARGE_FUNCTIONS = 0
MAX_DUPLICATE_NAMES = 0  # modules and classes that share their name with another one


@dataclass
class Count:
    """What a set of files contains."""

    lines: int = 0
    long_lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    names: int = 0
    name_characters: int = 0
    tuple_assignments: int = 0
    large_functions: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(self.code_lines, 1)

    @property
    def tuple_assignments_per_1000(self) -> float:
        return 1000 * self.tuple_assignments / max(self.code_lines, 1)

    @property
    def long_line_percent(self) -> float:
        return 100 * self.long_lines / max(self.lines, 1)

    @property
    def name_length(self) -> float:
        return self.name_characters / max(self.names, 1)


def source_files() -> list[str]:
    command = ["git", "ls-files", "octavo/*.py"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    return [name for name in listed.stdout.split() if "_pb2" not in name]


def count_file(name: str) -> Count:
    source = (ROOT / name).read_text(encoding="utf-8")
    lines = source.splitlines()
    count = Count(lines=len(lines))
    count.long_lines = sum(len(line) > LINE_LENGTH for line in lines)
    first_lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in COUNTED_TOKENS:
            continue
        first_lines.add(token.start[0])
        count.tokens += 1
        if token.type == tokenize.NAME:
            count.names += 1
            count.name_characters += len(token.string)
    count.code_lines = len(first_lines)
    is_kernel_file = name.startswith(KERNEL_FOLDERS)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            count.tuple_assignments += is_tuple_assignment(node)
        elif not is_kernel_file and isinstance(node, FUNCTIONS) and is_large(node):
            count.large_functions.append(f"{name}:{node.lineno} {node.name}")
    return count


def is_tuple_assignment(node: ast.Assign) -> bool:
    """Return whether a statement assigns several values to several targets and is not a swap."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    targets = {ast.unparse(element) for element in target.elts}
    return targets != {ast.unparse(element) for element in node.value.elts}


def is_large(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function has too many lines or parameters.

    The parameters of a command are its options and do not count.
    """
    if any("command" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    number = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    return length > FUNCTION_LINES or number > FUNCTION_PARAMETERS


def duplicate_names(files: list[str]) -> list[str]:
    """Return the module and class names that occur more than once in the package."""
    modules = Counter(Path(name).stem for name in files if not name.endswith("__init__.py"))
    classes: Counter[str] = Counter()
    for name in files:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    doubled = [f"module {name}" for name, number in modules.items() if number > 1]
    return doubled + [f"class {name}" for name, number in classes.items() if number > 1]


def describe(title: str, count: Count) -> str:
    return (
        f"{title:24} {count.lines:6} lines  {count.tokens_per_line:5.2f} tokens/line  "
        f"{count.tuple_assignments_per_1000:5.2f} tuple assignments/1,000  "
        f"{count.long_line_percent:4.1f} % long lines  {count.name_length:4.2f} characters/name  "
        f"{len(count.large_functions)} large functions"
    )


def main() -> int:
    files = source_files()
    total = Count()
    folders: dict[str, Count] = defaultdict(Count)
    for name in files:
        count = count_file(name)
        total.add(count)
        folders["/".join(name.split("/")[:2])].add(count)
    doubled = duplicate_names(files)
    if "--by-folder" in sys.argv:
        for folder, count in sorted(folders.items()):
            print(describe(folder, count))
        print("\n".join([*total.large_functions, *doubled]))
    print(describe("octavo", total), f" {len(doubled)} duplicate names")
    failures = {
        "tokens per line": total.tokens_per_line > MAX_TOKENS_PER_LINE,
        "tuple assignments": total.tuple_assignments_per_1000 > MAX_TUPLE_ASSIGNMENTS,
        "long lines": total.long_line_percent > MAX_LONG_LINES,
        "name length": total.name_length < MIN_NAME_LENGTH,
        "large functions": len(total.large_functions) > MAX_LARGE_FUNCTIONS,
        "duplicate names": len(doubled) > MAX_DUPLICATE_NAMES,
    }
    for limit, failed in failures.items():
        if failed:
            print(f"readability: the limit on {limit} is exceeded (tools/readability.py)")
    if any(failures.values()):
        print("\n".join([*total.large_functions, *doubled]))
    return int(any(failures.values()))


if __name__ == "__main__":
    sys.exit(main())
