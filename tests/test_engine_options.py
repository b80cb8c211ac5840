"""EngineOptions: one declaration of every engine option, valid from the start."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from octavo.engine_options import EngineKeywords, EngineOptions, from_keywords
from octavo.errors import InvalidRequest
from octavo.option_declaration import option_declarations
from octavo.vllm_options import ADVICE, DEFAULTS, NO_EFFECT, OTHER_NAMES


def members(hint: Any) -> set[Any]:
    """The types of a union, or the type itself."""
    return set(get_args(hint)) if isinstance(hint, UnionType) else {hint}


def test_editors_see_every_option_as_a_keyword_of_llm() -> None:
    keywords = get_type_hints(EngineKeywords)
    options = get_type_hints(EngineOptions)
    assert keywords.keys() == options.keys()
    for name, hint in options.items():
        wider = members(keywords[name]) - members(hint)
        assert members(hint) <= members(keywords[name]), name
        parsed = {str, dict[str, Any]} if name.endswith("_config") else {list[Any]}
        assert wider <= {os.PathLike[str], type(None)} | parsed, name


def test_every_option_is_declared() -> None:
    assert option_declarations(EngineOptions).keys() == {
        field.name for field in fields(EngineOptions)
    }


def test_every_option_is_described() -> None:
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
    table = page.partition("## Constructor")[2].partition("\n## ")[0]
    described = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line)}
    assert option_declarations(EngineOptions).keys() <= described


def test_values_are_converted_to_what_can_be_sent() -> None:
    options = from_keywords(
        {
            "max_num_seqs": np.int64(4),
            "swap_space": np.float32(0.5),
            "kv_disk_path": Path("somewhere"),
            "kv_cache_dtype": "fp8_e4m3",
            "quantization": None,
        }
    )
    assert type(options.max_num_seqs) is int and type(options.swap_space) is float
    assert options.kv_disk_path == "somewhere"
    assert (options.kv_cache_dtype, options.quantization) == ("fp8", "auto")


def test_options_reach_another_process_unchanged() -> None:
    msgspec = pytest.importorskip("msgspec")
    from octavo.serve.channel.messages import Start, decode_to_engine, encode

    options = EngineOptions(
        swap_space=2, max_num_seqs=3, override_generation_config={"top_k": 4}, kv_disk_path="x"
    )
    start = decode_to_engine(encode(Start("model", options)))
    assert isinstance(start, Start) and start.options == options
    assert msgspec.json.decode(msgspec.json.encode(options), type=EngineOptions) == options


def test_options_cannot_be_changed_and_copies_are_checked() -> None:
    options = EngineOptions()
    with pytest.raises(FrozenInstanceError):
        options.depth = 2  # type: ignore[misc]
    with pytest.raises(
        InvalidRequest, match="depth must be an integer of at least 1 and at most 3"
    ):
        replace(options, depth=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": 3}, "tokenizer must be a path, got 3"),
        ({"max_num_seqs": None}, "max_num_seqs must be an integer of at least 1, got None"),
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be a number in \(0, 1\]"),
        ({"kv_eviction": "oldest"}, "kv_eviction must be one of none, sinks, heavy, got 'oldest'"),
        ({"kv_canary": True, "swap_space": 1}, "kv_canary does not support KV that is offloaded"),
        ({"enable_prefix_caching": False, "kv_disk_path": "x"}, "leave it enabled"),
    ],
)
def test_invalid_values_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        EngineOptions(**options)
    assert caught.value.param in {*options, "swap_space"}


def test_a_policy_of_ones_own_is_not_imported_by_the_check() -> None:
    assert EngineOptions(scheduling_policy="no.such.module:Policy").scheduling_policy


def test_every_option_of_vllm_is_accepted_at_its_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert from_keywords({**DEFAULTS, "depth": 2}) == EngineOptions(depth=2)
    assert "options without effect here:" in caplog.text
    assert not DEFAULTS.keys() & option_declarations(EngineOptions).keys()
    assert not NO_EFFECT.keys() & (ADVICE.keys() | OTHER_NAMES.keys())


def test_a_switch_of_vllm_turns_on_the_option_that_octavo_has_for_it() -> None:
    for name, other in OTHER_NAMES.items():
        assert (
            from_keywords({name: other.default}) == from_keywords({name: None}) == EngineOptions()
        )
        expected = EngineOptions(**{other.option: True})
        assert from_keywords({name: not other.default}) == expected
        # EngineArgs passes Octavo's own option too, with its default.
        assert from_keywords({name: not other.default, other.option: False}) == expected
        assert from_keywords({name: other.default, other.option: True}) == expected


def test_marks_of_reasoning_are_accepted_if_they_are_the_usual_ones() -> None:
    usual = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    assert from_keywords({"reasoning_config": usual}) == EngineOptions()
    with pytest.raises(InvalidRequest, match="styles of reasoning"):
        from_keywords({"reasoning_config": {**usual, "reasoning_end_str": "[end]"}})


def test_none_asks_for_the_default() -> None:
    nothing = dict.fromkeys(option_declarations(EngineOptions))
    assert from_keywords(nothing) == EngineOptions()


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"enable_lora": True}, "enable_lora=True is not supported: an adapter must be merged"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 is not supported: .* quantization"),
        ({"kv_cache_memory_bytes": 1}, "bound the KV cache with gpu_memory_utilization"),
        ({"task": "classify"}, "task='classify' is not supported: Octavo generates text and"),
        ({"no": 1}, "LLM does not support these options: no. Remove them"),
        ({"max_modellen": 3}, "max_modellen. Did you mean max_model_len[?] Remove them"),
    ],
)
def test_options_that_would_have_an_effect_are_refused_with_advice(
    given: dict[str, Any], advice: str
) -> None:
    with pytest.raises(InvalidRequest, match=advice) as caught:
        from_keywords(given)
    assert caught.value.param in given


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"load_format": "safetensors"}, {"load_format": "auto"}),
        ({"max_model_len": -1}, {"max_model_len": None}),
        ({"task": "generate", "distributed_executor_backend": "mp"}, {}),
    ],
)
def test_values_of_vllm_are_understood(given: dict[str, Any], kept: dict[str, Any]) -> None:
    assert from_keywords(given) == EngineOptions(**kept)


@pytest.mark.parametrize("given", [{"dtype": "int8"}, {"load_format": "pt"}, {"hf_overrides": 3}])
def test_values_that_are_not_understood_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(given))} must be"):
        from_keywords(given)
