"""A model that is divided between ranks computes what the whole model computes. The ranks are
threads here; tests/test_tensor_parallel.py starts processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.model import CausalLM
from octavo.model.base import Matrix
from octavo.model.load import LoadOptions, load_model
from octavo.model.tensor_parallel import divide, split_range
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import dense
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.model import test_prequantized, test_prequantized_fp8
from tests.tiny import ARCHITECTURES, hf_logits, model_dir

ATOL = 1e-4
BLOCK = 4
PROMPT = [(7 * position * position + 3) % 250 for position in range(30)]


class Threads:
    """The ranks of one model as threads."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self.values[rank] = value
        self.barrier.wait()
        values = [each.clone() for each in self.values]
        self.barrier.wait()
        return values


class ThreadRank:
    """One of the ranks, as octavo.ops.collectives.Collectives."""

    def __init__(self, threads: Threads, rank: int, size: int):
        self.threads = threads
        self.rank = rank
        self.size = size
        self.sums = 0

    def all_reduce(self, partial: Tensor) -> Tensor:
        self.sums += 1
        return torch.stack(self.threads.exchange(self.rank, partial)).sum(0)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.threads.exchange(self.rank, part), 1)


def load_rank(
    folder: str | Path, rank: int, size: int, ops: Any, quantization: str = "none"
) -> CausalLM:
    options = LoadOptions(dtype="float32", quantization=quantization, rank=rank, num_ranks=size)
    return load_model(folder, options, ops=ops, progress=False)[0]


def load_ranks(
    folder: str | Path, size: int, ops_class: type = CpuOps, quantization: str = "none"
) -> list[CausalLM]:
    threads = Threads(size)
    models = []
    for rank in range(size):
        ops = ops_class()
        ops.ranks = ThreadRank(threads, rank, size)
        models.append(load_rank(folder, rank, size, ops, quantization))
    return models


@torch.inference_mode()
def logits_in_two_chunks(model: CausalLM) -> Tensor:
    (table,) = scattered_tables([len(PROMPT)], BLOCK)
    kv = empty_kv(model.config, [table], BLOCK, "cpu")
    prompt = [token % model.config.vocab_size for token in PROMPT]
    logits = []
    for first, chunk in ((0, prompt[:17]), (17, prompt[17:])):
        batch = make_batch([(chunk, first)], [table], BLOCK, "cpu")
        logits.append(model.forward_with_logits(batch, kv)[1])
    return torch.cat(logits)


def run_ranks(models: list[CausalLM]) -> list[Tensor]:
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(logits_in_two_chunks, models))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_compute_the_logits_of_the_whole_model(architecture: str, size: int) -> None:
    models = load_ranks(model_dir(architecture), size)
    results = run_ranks(models)
    for logits in results[1:]:
        assert torch.equal(logits, results[0]), "every rank must sample from the same logits"
    torch.testing.assert_close(results[0], hf_logits(architecture, PROMPT), atol=ATOL, rtol=ATOL)
    ranks = models[0].ops.ranks
    assert isinstance(ranks, ThreadRank)
    assert ranks.sums == 2 * (1 + 2 * 2), "an embedding and two layers need 1 + 2 * 2 sums a step"


def check_ranks(
    folder: str | Path,
    size: int,
    quantization: str,
    ops_class: type = ReferenceOps,
    atol: float = ATOL,
) -> None:
    whole = load_rank(folder, 0, 1, ops_class(), quantization)
    ranks = load_ranks(folder, size, ops_class, quantization)
    wanted = logits_in_two_chunks(whole)
    torch.testing.assert_close(run_ranks(ranks)[0], wanted, atol=atol, rtol=ATOL)


@pytest.mark.parametrize(
    ("architecture", "quantization", "size"),
    [
        ("llama", "int8", 2),
        ("gpt2", "int8", 2),
        ("gpt2", "int8", 4),
        ("qwen2", "fp8-a16", 2),
        ("qwen3", "int8-g32", 2),
        ("qwen3", "int4-g32", 2),
        ("gemma3", "int4-g32-asym", 2),
    ],
)
def test_quantised_ranks_compute_the_logits_of_the_whole_model(
    architecture: str, quantization: str, size: int
) -> None:
    check_ranks(model_dir(architecture), size, quantization)


# CPU kernels round activations to 8 bits. That may turn a difference of the last bit of a float
# into one of a hundredth. The logits of this model have a standard deviation of 2.4.
@pytest.mark.parametrize(("ops_class", "atol"), [(ReferenceOps, ATOL), (CpuOps, 0.1)])
@pytest.mark.parametrize(
    "quantization", ["int8", "fp8-a16", "int8-g32", "int4-g32", "int4-g32-asym"]
)
def test_four_quantised_ranks_share_two_kv_heads(
    quantization: str, ops_class: type, atol: float, tmp_path: Path
) -> None:
    """Every rank has one query head, which is one group of inputs of the output projection."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=32)
    more = dict(vocab_size=300, num_hidden_layers=2, num_key_value_heads=2)
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **more))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    check_ranks(tmp_path, 4, quantization, ops_class, atol)


@pytest.mark.parametrize("case", test_prequantized.CASES)
def test_ranks_divide_4_bit_checkpoints_in_whole_groups(case: str, tmp_path: Path) -> None:
    test_prequantized.write(tmp_path, *test_prequantized.CASES[case])
    check_ranks(tmp_path, 2, "auto")


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_divide_an_fp8_checkpoint_with_one_kv_head(size: int, tmp_path: Path) -> None:
    test_prequantized_fp8.write(tmp_path, "compressed-weights-only")
    check_ranks(tmp_path, size, "auto")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4-g32"])
def test_the_parts_of_a_weight_are_the_weight(quantization: str) -> None:
    whole = load_rank(model_dir("gemma3"), 0, 1, ReferenceOps(), quantization)
    ranks = load_ranks(model_dir("gemma3"), 2, ReferenceOps, quantization)
    names = {name for name, module in whole.named_modules() if isinstance(module, Matrix)}
    assert {"embed", "layers.0.out", "layers.1.down"} <= names
    for name in names:
        parts = [dense(rank.get_submodule(name).weight, torch.float32) for rank in ranks]
        weight = dense(whole.get_submodule(name).weight, torch.float32)
        assert sum(part.numel() for part in parts) == weight.numel(), name
        if name.endswith(("out", "down")):
            assert torch.equal(torch.cat(parts, 1), weight), name
        elif name == "embed":
            assert torch.equal(torch.cat(parts), weight), name


def test_head_rows_are_those_of_the_whole_model() -> None:
    tokens = torch.tensor([0, 299, 150, 149])
    wanted = load_rank(model_dir("llama"), 0, 1, CpuOps()).head_rows(tokens)
    models = load_ranks(model_dir("llama"), 2)
    with torch.inference_mode(), ThreadPoolExecutor(2) as pool:
        for rows in pool.map(lambda model: model.head_rows(tokens), models):
            torch.testing.assert_close(rows, wanted, atol=1e-6, rtol=1e-6)


def test_dummy_weights_that_two_ranks_hold_are_equal() -> None:
    config = load_rank(model_dir("gpt2"), 0, 1, CpuOps()).config
    models = []
    for rank in range(2):
        options = LoadOptions(dtype="float32", load_format="dummy", rank=rank, num_ranks=2)
        ops = ReferenceOps()
        models.append(load_model(model_dir("gpt2"), options, ops=ops, progress=False)[0])
    first, second = models
    assert torch.equal(first.positions.weight, second.positions.weight)  # type: ignore[union-attr]
    assert not torch.equal(first.embed.weight, second.embed.weight)
    assert first.config.num_heads + second.config.num_heads == config.num_heads


# ---- which rank holds what -----------------------------------------------------------------------

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_position=64,
)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8, 12, 24])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_query_head_belongs_to_one_rank_that_has_its_kv_head(
    num_kv_heads: int, size: int
) -> None:
    config = replace(CONFIG, num_heads=24, num_kv_heads=num_kv_heads)
    owners: list[int] = []
    for rank in range(size):
        own = divide(config, rank, size)
        (queries,) = own.shares.query.ranges
        (keys,) = own.shares.key.ranges
        first_head = queries.start // 64
        for local_head in range(own.num_heads):
            kv_head = keys.start // 64 + local_head // (own.num_heads // own.num_kv_heads)
            assert kv_head == (first_head + local_head) // (24 // num_kv_heads)
            owners.append(first_head + local_head)
        assert own.num_kv_heads <= divide(config, 0, size).num_kv_heads, "rank 0 has the most KV"
    assert owners == list(range(24))


def test_the_embedded_models_nine_heads_are_divided_unevenly() -> None:
    heads = [divide(CONFIG, rank, 2).num_heads for rank in range(2)]
    assert heads == [6, 3]
    heads = [divide(CONFIG, rank, 4).num_heads for rank in range(4)]
    assert heads == [2, 1, 3, 3]


def test_groups_of_quantised_weights_stay_whole() -> None:
    sizes = [divide(CONFIG, rank, 5, group_size=128).intermediate_size for rank in range(5)]
    assert sum(sizes) == 1536
    assert all(size % 128 == 0 for size in sizes)


@pytest.mark.parametrize("total", [1, 7, 48, 300])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_cover_everything_and_the_first_is_the_largest(total: int, count: int) -> None:
    parts = [split_range(total, index, count) for index in range(count)]
    assert [number for part in parts for number in part] == list(range(total))
    assert len(parts[0]) == max(map(len, parts)) <= min(map(len, parts)) + 1


@pytest.mark.parametrize(
    ("config", "size", "group_size", "problem"),
    [
        (CONFIG, 10, 1, "9 heads"),
        (CONFIG, 8, 256, "groups of 256"),
        (replace(CONFIG, vocab_size=5), 4, 1, "vocabulary has 5 tokens"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    config: ModelConfig, size: int, group_size: int, problem: str
) -> None:
    with pytest.raises(ModelError, match=f"tensor_parallel_size {size} is too large.*{problem}"):
        for rank in range(size):
            divide(config, rank, size, group_size)


def test_heads_that_are_not_whole_groups_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="o_proj cannot be divided in the format int4-g32"):
        load_rank(model_dir("llama"), 1, 2, ReferenceOps(), "int4-g32")
