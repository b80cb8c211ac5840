"""docs/glossary.md is true, and words that it replaced do not return.

Each term appears once and names a file or class that exists. A retired word must not be part of an
identifier or the name of a module in octavo/. STILL_USED lists the files that have yet to be
renamed. It only shrinks: an entry that is no longer needed fails the test.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "octavo"
ENTRY = re.compile(
    r"^\*\*(?P<term>[^*]+)\*\* \(`(?P<path>[\w./]+)(?::(?P<name>\w+))?`\): ", re.MULTILINE
)

# Parts of identifiers that the field's words have replaced -> what to write instead.
RETIRED_WORDS = {
    "acquit": "clear, remove",
    "aside": "pause",
    "beat": "heartbeat",
    "books": "scheduler state",
    "disown": "invalidate",
    "guilty": "quarantined",
    "heard": "received",
    "intake": "admission",
    "lift": "promote",
    "lifted": "promoted",
    "look": "the verb that says what is done: sample, request_view, check",
    "looks": "the verb that says what is done: samples, requests_view, checks",
    "mends": "recovers",
    "news": "events, outputs",
    "nobody": "empty, padding",
    "outranked": "paused",
    "outranks": "pauses",
    "pace": "latency target, step budget",
    "partner": "chat backend",
    "patience": "timeout, allowance",
    "patient": "offline",
    "polite": "step budget",
    "pulse": "heartbeat",
    "rehearsal": "dummy run",
    "ride": "piggyback",
    "rider": "piggyback",
    "riders": "piggyback",
    "rides": "piggyback",
    "rising": "in flight",
    "said": "generated, sent, output",
    "sat": "paused",
    "seal": "checksum",
    "seals": "checksums",
    "shaper": "limiter",
    "somebody": "the noun that is meant",
    "spoilt": "corrupt",
    "startable": "admissible",
    "stood": "paused",
    "suspect": "quarantine",
    "suspects": "quarantine",
    "tell": "report, notify",
    "tells": "reports, notifies",
    "told": "reported, sent",
    "untold": "unreported",
    "urgency": "preemption",
    "vain": "futile",
    "whoever": "the noun that is meant",
    "wire": "protocol",
    "withdraw": "unpublish",
}

# Words that CUDA's own terms have replaced in the kernels.
RETIRED_CUDA_WORDS = {
    "deliver": "producer warp",
    "exchanged": "swizzled",
    "flying": "copies in flight",
    "meet": "grid barrier",
    "meeting": "grid barrier",
    "turn": "rope",
    "turned": "permuted",
}

# Module names that said too little, or meant something else than in the field.
RETIRED_MODULES = {
    "beat", "families", "few", "groups", "intake", "kept", "lag", "link", "links", "news", "pages",
    "partner", "patience", "pulse", "ride", "seals", "shares", "step_shape", "suspects", "team", "thinking",
    "urgency", "wire",
}  # fmt: skip

# Module names and identifiers that have yet to be replaced: file -> words.
STILL_USED_MODULES: set[str] = set()
STILL_USED: dict[str, set[str]] = {}


def package_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "_pb2" not in path.name]


def word_parts(identifier: str) -> set[str]:
    """Split `_tellAll_TOLDYou` into its words, in lower case."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", identifier)
    return {part.lower() for part in parts}


def retired_words_in(source: str) -> dict[str, int]:
    """Return the retired words among the identifiers of a file, with the line of the first."""
    # Most files contain none of the words anywhere, which a search finds much faster.
    if not re.search("|".join(RETIRED_WORDS), source, re.IGNORECASE):
        return {}
    found: dict[str, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string != "tell":  # a method of files
            for word in word_parts(token.string) & RETIRED_WORDS.keys():
                found.setdefault(word, token.start[0])
    return found


@cache
def top_level_names(path: Path) -> set[str]:
    """Return the classes, functions and variables that a Python file defines."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_each_term_of_the_glossary_appears_once_and_names_something_that_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = list(ENTRY.finditer(text))
    assert len(entries) >= 60
    assert len(entries) == len(re.findall(r"^\*\*", text, re.MULTILINE)), "an entry is malformed"
    terms = [entry["term"].lower() for entry in entries]
    assert sorted(set(terms)) == sorted(terms), "a term is defined twice"
    for entry in entries:
        path = ROOT / entry["path"]
        assert path.exists(), f"{entry['term']}: {entry['path']} does not exist"
        if entry["name"]:
            assert entry["name"] in top_level_names(path), f"{entry['term']}: no {entry['name']}"


def test_the_readers_pages_link_to_the_glossary() -> None:
    for page, link in (
        ("README.md", "docs/glossary.md"),
        ("CONTRIBUTING.md", "docs/glossary.md"),
        ("docs/index.md", "glossary.md"),
    ):
        assert f"({link}" in (ROOT / page).read_text(encoding="utf-8"), page


@pytest.mark.parametrize(
    ("identifier", "parts"),
    [
        ("_tell_all", {"tell", "all"}),
        ("ToldTwice", {"told", "twice"}),
        ("HTTPPatience", {"http", "patience"}),
        ("MAX_PATIENCE", {"max", "patience"}),
        ("storytelling", {"storytelling"}),
    ],
)
def test_identifiers_are_split_into_words(identifier: str, parts: set[str]) -> None:
    assert word_parts(identifier) == parts


def test_retired_words_do_not_return_as_identifiers() -> None:
    unexpected = []
    no_longer_needed = []
    for path in package_files():
        name = str(path.relative_to(ROOT))
        found = retired_words_in(path.read_text(encoding="utf-8"))
        allowed = STILL_USED.get(name, set())
        unexpected += [
            f"{name}:{line}: {word}: write {RETIRED_WORDS[word]}"
            for word, line in sorted(found.items())
            if word not in allowed
        ]
        no_longer_needed += [f"{name}: {word}" for word in sorted(allowed - found.keys())]
    no_longer_needed += [name for name in STILL_USED if not (ROOT / name).exists()]
    assert not unexpected, "\n".join(["retired words (docs/glossary.md):", *unexpected])
    assert not no_longer_needed, "\n".join(["remove these from STILL_USED:", *no_longer_needed])


def test_retired_words_do_not_return_in_cuda_kernels() -> None:
    for path in sorted(PACKAGE.rglob("*.cu*")):
        source = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        words = set[str]().union(*map(word_parts, re.findall(r"[A-Za-z_]\w*", source)))
        found = sorted(words & RETIRED_CUDA_WORDS.keys())
        assert not found, {word: f"write {RETIRED_CUDA_WORDS[word]}" for word in found}


def test_retired_words_do_not_return_as_module_names() -> None:
    modules = {str(path.relative_to(ROOT)) for path in package_files()}
    retired = {name for name in modules if Path(name).stem in RETIRED_MODULES}
    assert retired == STILL_USED_MODULES
