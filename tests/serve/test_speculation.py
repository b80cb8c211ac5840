"""A server with speculative decoding reports its drafts: in the usage of each reply, in its metrics and on its page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from octavo.cli.serve_command import announce
from octavo.core.event_stream import FIELDS
from octavo.engine_options import EngineOptions
from octavo.serve.serve_config import ServeConfig
from tests.serve.running import Running, events, server
from tests.serve.test_eviction import MODEL
from tests.serve.test_watch import lines, states, until, watch

METHOD = "ngram,k=3,adaptive=no,min=1"
PROMPT = [5, 6, 7, 8] * 8  # looking back finds something


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("drafting")
    with server(folder, engine={"speculative_config": METHOD}) as found:
        yield found


def counted(details: dict[str, int]) -> tuple[int, int]:
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_usage_and_metrics_count_the_same_drafts(drafting: Running) -> None:
    prefix = "octavo:spec_decode_num"

    def metrics_with(drafted: float) -> dict[str, float]:
        """The metrics once a heartbeat of the engine has brought its counts."""
        deadline = time.monotonic() + 10
        found = drafting.metrics()
        while (
            f'{prefix}_accepted_tokens_per_pos_total{{position="0"}}' not in found
            or found[f"{prefix}_draft_tokens_total"] < drafted
        ):
            assert time.monotonic() < deadline, "the engine's counts did not arrive"
            time.sleep(0.05)
            found = drafting.metrics()
        return found

    before = metrics_with(drafted=0)
    reply = drafting.complete(prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
    accepted, rejected = counted(reply["usage"]["completion_tokens_details"])
    assert accepted > 0 and rejected > 0
    drafted = before[f"{prefix}_draft_tokens_total"] + accepted + rejected
    after = metrics_with(drafted=drafted)

    def grew(name: str) -> float:
        return after[f"{prefix}_{name}"] - before[f"{prefix}_{name}"]

    assert grew("draft_tokens_total") == accepted + rejected
    assert grew("accepted_tokens_total") == accepted
    assert 0 < grew("drafts_total") <= grew("draft_tokens_total")
    by_place = [grew(f'accepted_tokens_per_pos_total{{position="{k}"}}') for k in range(3)]
    assert sum(by_place) == accepted and by_place == sorted(by_place, reverse=True)


def test_a_stream_counts_the_drafts_of_its_reply_so_far(drafting: Running) -> None:
    asked: dict[str, Any] = dict(
        prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True, model="tiny"
    )
    whole = drafting.post("/v1/completions", asked).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = drafting.post("/v1/completions", {**asked, "stream": True, "stream_options": options}).text  # fmt: skip
    usages = [found["usage"] for found in events(text) if found.get("usage")]
    accepted = [counted(usage["completion_tokens_details"])[0] for usage in usages]
    assert accepted == sorted(accepted) and len(set(accepted)) > 2
    assert usages[-1]["completion_tokens_details"] == whole["completion_tokens_details"]


def test_a_stop_string_ends_the_count(drafting: Running) -> None:
    asked = dict(prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
    text = drafting.complete(**asked)["choices"][0]["text"]
    usage = drafting.complete(**asked, stop=[text[20:22]])["usage"]
    accepted, rejected = counted(usage["completion_tokens_details"])
    assert 0 < accepted <= usage["completion_tokens"] and rejected > 0


def test_the_live_page_gets_the_method_and_its_drafts(drafting: Running) -> None:
    drafting.complete(prompt=PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    with watch(drafting) as socket:
        state = next(state for state in states(socket) if state["model"])
    assert state["model"]["speculative"] == METHOD + ",max=5"
    with watch(drafting) as socket:
        seen = lines(socket)
        drafting.complete(prompt=PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        planned = [line for line in until(seen, "finished") if line[0] == "planned"]
    drafts = FIELDS["planned"].index("drafts") - len(FIELDS["planned"])
    assert any(line[drafts] for line in planned)


def test_the_start_of_the_server_shows_the_method(capsys: pytest.CaptureFixture[str]) -> None:
    memory = dict.fromkeys(("weights", "activations", "kv", "kv_tokens"), 1000)
    loaded = replace(MODEL, memory=memory, speculative=METHOD)
    front = SimpleNamespace(
        engine_client=SimpleNamespace(model_info=lambda: loaded),
        config=ServeConfig(model="tiny"),
        tokenizer=SimpleNamespace(chat_templates={}),
    )
    announce(front, 8000)  # type: ignore[arg-type]
    drafts = f"on, up to 3 tokens per step (--speculative {METHOD}; off turns them off)"
    assert f"\ndrafts:  {drafts}\n" in capsys.readouterr().out
    loaded = replace(loaded, speculative="head,k=6")
    announce(front, 8000)  # type: ignore[arg-type]
    assert "weights 1000 B with the draft head, " in capsys.readouterr().out
    loaded = replace(loaded, speculative="")
    announce(front, 8000)  # type: ignore[arg-type]
    assert "\ndrafts:  off (--speculative turns them on)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sampling", "overrides", "source"),
    [
        ({}, None, "temperature 1 by default (the model has no sampling defaults)"),
        ({"temperature": 0.4}, {"temperature": 0.4}, "by default (--override-generation-config)"),
        ({"top_k": 3}, None, "temperature 1, top_k 3 by default (generation_config.json)"),
        ({"temperature": 0.4, "top_k": 3}, {"temperature": 0.4},
         "by default (generation_config.json and --override-generation-config)"),
    ],
)  # fmt: skip
def test_the_start_of_the_server_shows_where_sampling_defaults_come_from(
    capsys: pytest.CaptureFixture[str],
    sampling: dict[str, float],
    overrides: dict[str, float] | None,
    source: str,
) -> None:
    memory = dict.fromkeys(("weights", "activations", "kv", "kv_tokens"), 1000)
    loaded = replace(MODEL, memory=memory, sampling=sampling)
    front = SimpleNamespace(
        engine_client=SimpleNamespace(model_info=lambda: loaded),
        config=ServeConfig(engine=EngineOptions(override_generation_config=overrides)),
        tokenizer=SimpleNamespace(chat_templates={}),
    )
    announce(front, 8000)  # type: ignore[arg-type]
    assert source in capsys.readouterr().out


def test_without_speculation_the_usage_counts_no_drafts(running: Running) -> None:
    usage = running.complete(prompt=PROMPT, max_tokens=20)["usage"]
    assert counted(usage["completion_tokens_details"]) == (0, 0)
