"""Finds user code by name: package.module:Name, or the name of an entry point.

An installed package declares entry points in its pyproject.toml, for example a policy that
`--policy nightly` then means:

    [project.entry-points."octavo.policies"]
    nightly = "my_package.policies:Nightly"

Every process of Octavo that needs an extension imports it itself, so only names are sent between
processes. docs/extending.md has an example of each group.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points
from typing import Any

from octavo.errors import InvalidRequest

POLICIES = "octavo.policies"
ATTENTION_BACKENDS = "octavo.attention_backends"
LOGITS_PROCESSORS = "octavo.logits_processors"
TOOL_PARSERS = "octavo.tool_parsers"
# The name of an entry point of this group is that of an architecture in config.json.
ARCHITECTURES = "octavo.architectures"


def is_path(name: str) -> bool:
    """Return whether a name is package.module:Name."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def extension_names(group: str) -> list[str]:
    """Return the names that installed packages declare in a group."""
    return sorted(entry_points(group=group).names)


def find_extension(group: str, name: str, option: str) -> Any:
    """Return the object that a name means. `option` is the option that has the name.

    Raises InvalidRequest if the name means nothing, or if the code cannot be imported."""
    declared = [entry for entry in entry_points(group=group) if entry.name == name]
    if declared:
        target = declared[0].value
    elif is_path(name):
        target = name
    else:
        raise InvalidRequest(
            f"{option} {name!r} is unknown: it is neither package.module:Name nor an entry point "
            f"of the group {group}",
            option,
        )
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_beside_caller(module), attribute)
    except Exception as error:  # the module of an extension may raise anything
        raise InvalidRequest(
            f"{option} {name!r} cannot be loaded: {type(error).__name__}: {error}. Use "
            "package.module:Name of a package that Python can import",
            option,
        ) from error


def import_beside_caller(module: str) -> Any:
    """Import a module that is installed, or that lies in the current directory."""
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)  # at the end, so that nothing installed is hidden
    return importlib.import_module(module)
