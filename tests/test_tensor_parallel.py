"""Engines whose ranks are processes give the tokens of an engine with one rank, and no process is
left behind. tests/model/test_tensor_parallel.py has more models, with threads instead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest, OctavoError
from octavo.outputs import RequestOutput
from tests.tiny import ARCHITECTURES, model_dir

PROMPTS = [[5, 6, 7, 8], [9, 10] * 16, [20, 30, 40], [5, 6, 7, 8, 9, 10, 11]]
GREEDY = SamplingParams(
    temperature=0, max_tokens=64, ignore_eos=True, logprobs=0, prompt_logprobs=0
)
SAMPLED = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=8, min_p=0.01, logprobs=2)
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "kv_cache_dtype": "float32",
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 60,
    "progress": False,
}


def make(architecture: str, size: int, **options: Any) -> LLM:
    return LLM(model_dir(architecture), tensor_parallel_size=size, **{**SMALL, **options})


def processes(llm: LLM) -> list[int]:
    assert llm.ranks is not None
    return [process.pid for process in llm.ranks._processes.values()]


def has_ended(pid: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def check_equal(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        assert output.error is None
        for a, b in zip(output.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
            for entries, other_entries in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert entries.keys() == other_entries.keys()
                for token, entry in entries.items():
                    assert entry.logprob == pytest.approx(other_entries[token].logprob, abs=1e-4)
        for entries, other_entries in zip(
            (output.prompt_logprobs or [])[1:], (other.prompt_logprobs or [])[1:], strict=True
        ):
            assert entries is not None and other_entries is not None
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(other_entries[token].logprob, abs=1e-4)


def generate(llm: LLM) -> list[RequestOutput]:
    greedy = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return greedy + llm.generate(PROMPTS, SAMPLED, use_tqdm=False)


def test_two_ranks_generate_the_tokens_of_one() -> None:
    expected = generate(make("llama", 1))
    llm = make("llama", 2)
    (pid,) = processes(llm)
    check_equal(generate(llm), expected)
    config = llm.config
    assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (2, 1, 300)
    assert llm.memory.kv_per_token == 2 * 2 * 1 * 8 * 4, "K and V, layers, KV heads, dim, bytes"
    llm.close()
    assert has_ended(pid)
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output.error is not None and "were closed" in output.error


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_generates_the_tokens_of_one_rank(architecture: str, size: int) -> None:
    expected = generate(make(architecture, 1))
    llm = make(architecture, size)
    check_equal(generate(llm), expected)
    llm.close()


OPTIONS: dict[str, dict[str, Any]] = {
    "steps in flight": {"depth": 3},
    "small pool": {"num_gpu_blocks_override": 25},
    "no prefix cache": {"enable_prefix_caching": False},
    "host tier": {"num_gpu_blocks_override": 25, "swap_space": 0.01},
    "bounded kv": {"kv_eviction": "heavy", "kv_budget": 48},
    "canary": {"kv_canary": True},
    "int8 weights": {"quantization": "int8"},
    "int8 kv": {"kv_cache_dtype": "int8"},
    "float16": {"dtype": "float16", "kv_cache_dtype": "float16"},
    "ngram": {"speculative_config": "ngram"},
    "early exit": {"speculative_config": "early_exit,layer=1,k=3"},
    "draft model": {"speculative_config": "draft_model,model=LLAMA,k=3"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_works_on_two_ranks(name: str) -> None:
    """Rounding differs where numbers have few bits, so these need only run to the end."""
    options = dict(OPTIONS[name])
    if name == "draft model":
        options["speculative_config"] = options["speculative_config"].replace(
            "LLAMA", model_dir("llama")
        )
    llm = make("llama", 2, **options)
    outputs = generate(llm)
    llm.close()
    if name in ("int8 weights", "int8 kv", "float16"):
        assert all(output.error is None for output in outputs)
        assert all(len(output.outputs[0].token_ids) == 64 for output in outputs[: len(PROMPTS)])
    else:
        same = {"kv_eviction", "kv_budget"} & OPTIONS[name].keys()
        plain = make("llama", 1, **{key: OPTIONS[name][key] for key in same})
        check_equal(outputs, generate(plain))


@pytest.mark.slow
def test_a_prompt_is_served_from_disk_after_a_restart(tmp_path: Path) -> None:
    options = {"kv_disk_path": tmp_path, "swap_space": 0.01}
    prompt = list(range(40))
    first = make("llama", 2, **options)
    (expected,) = first.generate([prompt], GREEDY, use_tqdm=False)
    first.close()
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert len(folders) == 2, "every rank has records of its own"
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    again = make("llama", 2, **options)
    (output,) = again.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert again.engine.scheduler.counters.tiers.disk_tokens >= 32
    again.close()
    # Without the records of one rank there are no prefix hits, and the tokens are right.
    for record in (tmp_path / folders[1]).iterdir():
        record.unlink()
    third = make("llama", 2, **options)
    (output,) = third.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert third.engine.scheduler.counters.tiers.disk_tokens == 0
    third.close()


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_stops_the_engine_and_is_named() -> None:
    llm = make("llama", 4)
    ranks = processes(llm)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    os.kill(ranks[1], signal.SIGKILL)
    killed_at = time.monotonic()
    pieces = list(stream)
    assert time.monotonic() - killed_at < 5
    assert len(pieces) < 499
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output.error is not None
    assert f"rank 2 (process {ranks[1]}) has ended: SIGKILL" in output.error
    assert all(has_ended(pid) for pid in ranks), "the other ranks are useless without it"


SCRIPT = """
    import os, signal, sys
    from octavo import LLM, SamplingParams
    from tests.test_tensor_parallel import SMALL, processes

    llm = LLM(sys.argv[1], tensor_parallel_size=3, **SMALL)
    print(*processes(llm), flush=True)
    if sys.argv[2] == "kill":
        for piece in llm.stream([1, 2, 3], SamplingParams(max_tokens=900, ignore_eos=True)):
            os.kill(os.getpid(), signal.SIGKILL)
    elif sys.argv[2] == "raise":
        raise SystemExit(5)
    elif sys.argv[2] == "drop":
        del llm
        input()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "raise", "return", "drop"])
def test_no_end_of_rank_0_leaves_a_process_behind(end: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), model_dir("llama"), end]
    script = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert script.stdout is not None and script.stdin is not None
    ranks = [int(pid) for pid in script.stdout.readline().split()]
    assert len(ranks) == 2
    if end == "drop":
        assert all(has_ended(pid) for pid in ranks), "nothing refers to the LLM any more"
        script.stdin.write("\n")
        script.stdin.flush()
    code = script.wait(60)
    assert code == {"kill": -signal.SIGKILL, "raise": 5}.get(end, 0)
    assert all(has_ended(pid) for pid in ranks)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(OctavoError):
        LLM(tmp_path, tensor_parallel_size=2, **SMALL)
    with pytest.raises(OctavoError, match="tensor_parallel_size 5 is too large"):
        make("llama", 5)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ranks = [
        pid for pid in children if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert not ranks


@pytest.mark.slow
def test_another_way_to_draft_needs_another_engine() -> None:
    llm = make("llama", 2)
    with pytest.raises(InvalidRequest, match="tensor_parallel_size 1"):
        llm.with_options(speculative_config=None)
    llm.close()
