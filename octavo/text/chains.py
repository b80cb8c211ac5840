"""How deep a chain of definitions can get: rules of a grammar that name other rules, schemas that refer to other schemas.

llguidance compiles definitions recursively, so the depth decides how much stack it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Definition(NamedTuple):
    depth: int  # levels of nesting inside it
    links: Iterable[str]  # the definitions that it names


def chain_depths(graph: Mapping[str, Definition]) -> dict[str, int]:
    """For each definition an upper bound of the levels that a depth-first walk from it descends.

    A walk enters each definition at most once. So a group of definitions that refer to each other in a cycle contributes the
    levels of all its members, whatever the order of the walk. This is Tarjan's algorithm for strongly connected components,
    without recursion: a component is complete after every component that it links to.
    """
    depths: dict[str, int] = {}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    for first in graph:
        if first in order:
            continue
        order[first] = lowest[first] = len(order)
        open_nodes.append(first)
        path = [(first, iter(graph[first].links))]
        while path:
            node, links = path[-1]
            following = next((name for name in links if name in graph and name not in depths), None)
            if following is None:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[node])
                if lowest[node] == order[node]:
                    _close(graph, open_nodes, node, depths)
            elif following in order:
                lowest[node] = min(lowest[node], order[following])
            else:
                order[following] = lowest[following] = len(order)
                open_nodes.append(following)
                path.append((following, iter(graph[following].links)))
    return depths


def _close(
    graph: Mapping[str, Definition], open_nodes: list[str], first: str, depths: dict[str, int]
) -> None:
    """Take a complete component off the stack of open nodes and note its depth."""
    members = [open_nodes.pop()]
    while members[-1] != first:
        members.append(open_nodes.pop())
    below = max((depths.get(name, 0) for node in members for name in graph[node].links), default=0)
    total = below + sum(graph[node].depth for node in members)
    for node in members:
        depths[node] = total
