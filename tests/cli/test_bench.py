"""`octavo bench ...`: counts what arrived, and ends with a line of JSON."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from octavo import LLM
from octavo.bench import measure_batching, workloads
from octavo.bench.model_shapes import TINYLLAMA_1B
from octavo.bench.workloads import HardwareRates, Workload, limit_seconds
from octavo.cli.bench import throughput_runs
from octavo.cli.options import load_llm
from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError
from octavo.memory import parameter_count

Octavo = Callable[..., Result]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_batching, "copy_bandwidth", lambda device: 1e10)


def test_the_table_the_file_and_the_last_line_agree(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    result = octavo(
        "bench", "batching", tiny, "--repeat", 2, "--max-tokens", 5, "--json", tmp_path / "r.json"
    )
    assert result.exit_code == 0
    r = json.loads(result.stdout.splitlines()[-1])
    assert r == json.loads((tmp_path / "r.json").read_text())
    assert (
        r["requests"] == 4
        and r["max_tokens"] == 5
        and r["repeat"] == 2
        and r["same_tokens"] is True
    )
    for side in ("sequential_tok_s", "batched_tok_s", "ratio"):
        assert 0 < r[side]["min"] <= r[side]["median"] <= r[side]["max"]
        assert f"{r[side]['median']:.2f}" in result.stdout
    assert r["limit_batched_tok_s"] == 4 * r["limit_sequential_tok_s"] and r["prompt_tokens"] == [
        24,
        33,
        41,
        35,
    ]


def test_figures_from_a_busy_machine_are_marked(octavo: Octavo, tiny: str) -> None:
    assert measure_batching.noise([10, 11, 10], [30, 33, 31], [3.0, 3.0, 3.1], 4) == []
    assert (
        "one after another varied 2.0-fold"
        in measure_batching.noise([10, 20, 10], [30, 30, 30], [3.0, 1.5, 3.0], 4)[0]
    )
    assert (
        "more than 4 requests can gain"
        in measure_batching.noise([10, 10, 10], [50, 50, 50], [5.0, 5.0, 5.0], 4)[0]
    )
    result = octavo("bench", "batching", tiny, "--repeat", 1, "--max-tokens", 2)
    assert "not reliable: 1 repeats are too few to show the spread" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["noise"]


def test_the_sides_take_turns_to_be_first(tiny: str) -> None:
    llm, calls = LLM(tiny, progress=False), []
    real = llm.generate
    llm.generate = lambda prompts, *a, **k: calls.append(len(prompts)) or real(prompts, *a, **k)  # type: ignore[method-assign]
    r = measure_batching.measure(llm, max_tokens=2, repeat=2)
    assert calls == [1, 1, 1, 1, 4] * 2 + [4, 1, 1, 1, 1] and r["same_tokens"]


def test_the_floor_counts_what_a_step_reads(tiny: str) -> None:
    llm = LLM(tiny, progress=False)
    head_and_layers = 259 * 32 + 2 * 9280 + 32
    assert (
        measure_batching.bytes_per_step(llm) == 4 * head_and_layers
    )  # the embedding is only looked up


def test_the_floor_of_quantised_weights_reads_fewer_bytes_and_computes_the_same(tiny: str) -> None:
    plain, small = (LLM(tiny, quantization=name, progress=False) for name in ("none", "int8"))
    assert parameter_count(plain.model) == parameter_count(small.model)
    assert measure_batching.bytes_per_step(small) < 0.5 * measure_batching.bytes_per_step(plain)

    def limit(llm: LLM, machine: HardwareRates) -> float:
        parameters, load = parameter_count(llm.model), Workload([[1] * 9] * 3, [4] * 3)
        return limit_seconds(
            load, llm.config, parameters, measure_batching.bytes_per_step(llm), 4, machine
        )

    computes, reads = (
        HardwareRates(bytes_per_second=1e30, flops_per_second=1e9),
        HardwareRates(bytes_per_second=1e9, flops_per_second=1e30),
    )
    assert limit(plain, computes) == limit(small, computes) and limit(small, reads) < 0.6 * limit(
        plain, reads
    )


def test_a_workload_with_long_requests_raises_the_model_length(
    octavo: Octavo, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(workloads.WORKLOADS, "four", lambda: Workload([[5] * 40] * 2, [9, 8]))
    flags = ("--workloads", "four", "--repeat", 1, "--max-model-len", 16)
    result = octavo("bench", "throughput", tiny, *flags)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert row["workload"] == "four" and row["tok_s"] > 0


def test_workloads_have_the_sizes_that_the_documentation_states() -> None:
    sizes = {
        name: {(len(prompt), output) for prompt, output in zip(*workload[:2], strict=True)}
        for name in ("long_prompts", "long_context", "batch16", "batch32", "batch64")
        for workload in [workloads.WORKLOADS[name]()]
    }
    batch = {(200, 256)}
    assert sizes["long_prompts"] == {(3800, 250)} and sizes["long_context"] == {(30000, 256)}
    assert sizes["batch16"] == sizes["batch32"] == sizes["batch64"] == batch
    assert workloads.longest_request(["batch64", "long_context", "single"]) == 30256


def test_copy_bandwidth_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (
        1e8
        < measure_batching.copy_bandwidth(torch.device("cpu"), copy_bytes=2**22, rounds=2)
        < 1e13
    )


def test_the_default_model_has_no_tokenizer_and_realistic_prompts() -> None:
    small = TINYLLAMA_1B | {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    options = EngineOptions(load_format="dummy", max_num_seqs=4, skip_tokenizer_init=True)
    llm = load_llm(small, options)
    prompts = measure_batching.encode(llm)
    assert [len(p) for p in prompts] == [6, 8, 7, 8] and prompts == measure_batching.encode(llm)
    assert measure_batching.measure(llm, max_tokens=3, repeat=1)["same_tokens"]


def test_tokens_that_did_not_arrive_are_not_counted(tiny: str) -> None:
    llm = LLM(tiny, progress=False, max_model_len=40)  # too short for the longest prompt's tokens
    with pytest.raises(OctavoError):
        measure_batching.measure(llm, max_tokens=20, repeat=1)


def test_a_bench_that_fails_is_an_error(octavo: Octavo, tiny: str) -> None:
    result = octavo("bench", "batching", tiny, "--max-model-len", 44, "--max-tokens", 20)
    assert result.exit_code == 2 and "tokens arrived" in result.stderr


def test_attention_is_measured_over_every_kind_of_kv(octavo: Octavo, tmp_path: Path) -> None:
    flags = [
        "--device",
        "cpu",
        "--heads",
        4,
        "--kv-heads",
        2,
        "--dim",
        32,
        "--repeat",
        2,
        "--shapes",
        "2x40,1x1K",
    ]
    result = octavo("bench", "attention", *flags, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.stderr
    r = json.loads(result.stdout.splitlines()[-1])
    assert r == json.loads((tmp_path / "r.json").read_text())
    assert [(x["sequences"], x["tokens"], x["kv"]) for x in r["rows"]] == [
        (s, n, kv) for s, n in ((2, 40), (1, 1024)) for kv in ("float16", "int8", "fp8")
    ]
    assert [x["kv_bytes"] for x in r["rows"][:2]] == [2 * 40 * 4 * 32 * 2, 2 * 40 * 4 * (32 + 4)]
    assert all(0 < x["min_s"] <= x["seconds"] <= x["max_s"] and x["of_copy"] > 0 for x in r["rows"])
    assert octavo("bench", "attention", "--heads", 3, "--kv-heads", 2).exit_code == 2


def test_kv_formats_are_compared_with_auto(octavo: Octavo, tiny: str) -> None:
    result = octavo(
        "bench",
        "kv",
        tiny,
        "--passages",
        1,
        "--length",
        40,
        "--repeat",
        1,
        "--formats",
        "int8,float16",
    )
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [r["format"] for r in rows] == ["auto", "int8", "float16"]
    assert (
        rows[0]["perplexity_ratio"] == 1
        and rows[0]["logprob_error"] == 0 < rows[2]["logprob_error"] < rows[1]["logprob_error"]
    )
    assert (
        rows[2]["kv_bytes_per_token"] * 2
        == rows[0]["kv_bytes_per_token"]
        > rows[1]["kv_bytes_per_token"] * 2
    )


def test_an_evicted_prompt_is_timed_from_each_tier(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    args = [
        "--tokens",
        200,
        "--repeat",
        2,
        "--kv-host-gib",
        0.01,
        "--kv-disk",
        tmp_path,
        "--kv-disk-gib",
        0.5,
    ]
    result = octavo("bench", "tiers", tiny, *args)
    assert result.exit_code == 0
    r = json.loads(result.stdout.splitlines()[-1])
    assert r["same_tokens"] is True and r["disk_misses"] == {}
    assert r["host_cached_tokens"] == r["disk_cached_tokens"] == r["paged_cached_tokens"] == 192
    assert (
        r["load_bytes"] > 0
        and r["host_ttft_s"]["min"] > 0
        and r["disk_ttft_s"]["min"] > 0
        and r["disk_records"] > 24
    )
    assert (
        r["parts_s"]["paged"]["read"] > 0 == r["parts_s"]["host"]["read"]
        and r["busy_readers"]["paged"] > 0
    )
    assert (
        sum(r["parts_s"]["device"].values()) <= r["device_ttft_s"]["max"]
        and r["read_alone_bytes_s"]["1"] > 0
    )
    assert "host memory" in result.stdout and "All tiers gave the same tokens" in result.stdout
    assert (
        "parts of the time, in ms" in result.stdout
        and "blocks loaded while others were read" in result.stdout
    )


def test_weight_formats_as_a_table_and_as_a_picture(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    small = ("--passages", 1, "--length", 40, "--repeat", 1, "--formats", "int8,int4-g32")
    result = octavo("bench", "quant", tiny, *small, "--picture", tmp_path / "q.svg")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [r["format"] for r in rows] == ["none", "int8", "int4-g32"]
    assert rows[0]["bytes_per_weight"] > rows[1]["bytes_per_weight"] > 1
    shown = [
        node.text
        for node in ET.fromstring((tmp_path / "q.svg").read_text()).iter(
            "{http://www.w3.org/2000/svg}text"
        )
    ]
    assert [shown.count(r["format"]) for r in rows] == [3, 3, 3]  # a point, and a bar in two charts


def test_the_bar_of_throughput_names_every_run() -> None:
    assert throughput_runs(["single", "four"], 2) == [
        "measuring single, warm-up",
        "measuring single, run 1 of 2",
        "measuring single, run 2 of 2",
        "measuring four, warm-up",
        "measuring four, run 1 of 2",
        "measuring four, run 2 of 2",
    ]
