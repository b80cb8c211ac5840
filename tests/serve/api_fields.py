"""Sends every field of an API and checks that it is honoured, refused by name, or named in the
header x-ignored-params. test_fields.py does the same for chats and completions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from octavo.serve.api.protocol import Common
from octavo.serve.api.request_fields import HONOURED, IGNORED, LABEL, REFUSED, Field
from tests.serve.running import Running
from tests.serve.test_fields import BEAMS, LOUD, SHOWN, STATUS

# These fields of all requests have no effect on the text of a reply here.
WITHOUT_EFFECT = {"cache_salt", "priority", "request_id", "user"}
CHANGING = re.compile(
    r'"(id|item_id|request_id|created|created_at|completed_at|call_id|\w+_duration)": ?("[^"]*"|[\d.]+),?'
)
Example = tuple[dict[str, Any], dict[str, Any]]
# These APIs reply with one choice, so best_of sets the number of beams.
SEARCH = {**{name: value for name, value in BEAMS.items() if name != "n"}, "best_of": 3}
SEARCHES: dict[str, Example] = {
    "use_beam_search": ({"use_beam_search": True, "best_of": 2}, LOUD),
    "length_penalty": ({**SEARCH, "length_penalty": -9}, {**SEARCH, "length_penalty": 9}),
    "early_stopping": ({**SEARCH, "early_stopping": True}, {**SEARCH, "early_stopping": "never"}),
}


@dataclass
class FieldChecks:
    path: str
    base: dict[str, Any]
    group: tuple[Field, ...]
    shown: dict[str, Example]  # For each honoured field: what is sent with it and without it.
    asks: dict[str, Any]  # For each refused field: a value that asks for something.
    elsewhere: set[str] = field(default_factory=set)  # The fields that other tests check.
    sends_common: bool = True  # False for a route whose struct another route checks.

    def names(self, status: str) -> list[str]:
        return [one.name for one in self.group if one.chat == status]

    def seen(self, running: Running, asked: dict[str, Any]) -> str:
        """The reply without what changes from one to the next."""
        reply = running.post(self.path, {**self.base, **asked})
        ignored = reply.headers.get("x-ignored-params")
        return f"{reply.status_code} {ignored} {CHANGING.sub('', reply.text)}"

    def check_honoured(self, running: Running) -> None:
        own = {one.name for one in self.group}
        common = {
            name: (with_it, without)
            for name, (with_it, without) in (SHOWN | SEARCHES).items()
            if self.sends_common and name in Common.__struct_fields__ and name not in own
        }
        if self.sends_common:
            assert set(common) | WITHOUT_EFFECT | own >= set(Common.__struct_fields__)
        assert set(self.shown) == set(self.names(HONOURED)) - self.elsewhere
        plain_replies: dict[str, str] = {}  # what is sent -> the reply
        for name, (with_it, without) in {**common, **self.shown}.items():
            sent = json.dumps(without)
            if sent not in plain_replies:
                plain_replies[sent] = self.seen(running, without)
                assert plain_replies[sent] == self.seen(running, without), "nothing else changes it"
            plain = plain_replies[sent]
            found = self.seen(running, with_it)
            assert plain != found, f"{name} has no effect"
            assert found.startswith(f"{STATUS.get(name, 200)} "), (name, found)

    def check_others(self, running: Running) -> None:
        for name in self.names(IGNORED):
            reply = running.post(self.path, {**self.base, name: "x"})
            assert reply.status_code == 200, (name, reply.text)
            assert reply.headers["x-ignored-params"] == name
        for name in self.names(LABEL):
            reply = running.post(self.path, {**self.base, name: {"a": "b"}})
            assert reply.status_code == 200 and "x-ignored-params" not in reply.headers
        assert set(self.asks) == set(self.names(REFUSED))
        for name, value in self.asks.items():
            reply = running.post(self.path, {**self.base, name: value})
            assert reply.status_code == 400, name
            assert f"{name} is not supported" in json.dumps(reply.json()), name
        quiet = {one.name: one.neutral[0] for one in self.group if one.neutral}
        reply = running.post(self.path, {**self.base, **quiet})
        assert reply.status_code == 200 and "x-ignored-params" not in reply.headers, reply.text
