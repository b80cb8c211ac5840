"""Measures chains of definitions: grammar rules that name other rules, schemas that refer to
others.

llguidance compiles definitions recursively, so the depth decides how much stack it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Definition(NamedTuple):
    depth: int  # levels of nesting inside the definition
    links: Iterable[str]  # the definitions that this one names


def chain_depths(definitions: Mapping[str, Definition]) -> dict[str, int]:
    """Return for each definition the most levels that a depth-first walk from it can descend.

    A walk enters each definition at most once. So a group of definitions that refer to each other
    in a cycle contributes the levels of all its members, whatever the order of the walk. This is
    Tarjan's algorithm for strongly connected components, without recursion: a component is complete
    after every component that it links to.
    """
    depths: dict[str, int] = {}
    visit_order: dict[str, int] = {}
    lowest_reachable: dict[str, int] = {}
    open_definitions: list[str] = []
    for root in definitions:
        if root in visit_order:
            continue
        visit_order[root] = lowest_reachable[root] = len(visit_order)
        open_definitions.append(root)
        current_path = [(root, iter(definitions[root].links))]
        while current_path:
            definition, remaining_links = current_path[-1]
            next_definition = next(
                (
                    linked
                    for linked in remaining_links
                    if linked in definitions and linked not in depths
                ),
                None,
            )
            if next_definition is None:
                current_path.pop()
                if current_path:
                    parent = current_path[-1][0]
                    lowest_reachable[parent] = min(
                        lowest_reachable[parent], lowest_reachable[definition]
                    )
                if lowest_reachable[definition] == visit_order[definition]:
                    _close_component(definitions, open_definitions, definition, depths)
            elif next_definition in visit_order:
                lowest_reachable[definition] = min(
                    lowest_reachable[definition], visit_order[next_definition]
                )
            else:
                visit_order[next_definition] = lowest_reachable[next_definition] = len(visit_order)
                open_definitions.append(next_definition)
                current_path.append((next_definition, iter(definitions[next_definition].links)))
    return depths


def _close_component(
    definitions: Mapping[str, Definition],
    open_definitions: list[str],
    root: str,
    depths: dict[str, int],
) -> None:
    """Take a complete component off the stack of open definitions and store its depth."""
    members = [open_definitions.pop()]
    while members[-1] != root:
        members.append(open_definitions.pop())
    depth_below = max(
        (depths.get(linked, 0) for member in members for linked in definitions[member].links),
        default=0,
    )
    component_depth = depth_below + sum(definitions[member].depth for member in members)
    for member in members:
        depths[member] = component_depth
