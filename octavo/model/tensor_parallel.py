"""Tensor parallelism: which part of a model each rank holds.

Every matrix product of a layer belongs to a pair. The first matrix is divided by outputs, the
second by the same dimension, which is its input:

    rank 0   hidden -> qkv of heads 0, 1 -> attention -> out, columns of heads 0, 1 -.
    rank 1   hidden -> qkv of heads 2, 3 -> attention -> out, columns of heads 2, 3 -+-> sum, hidden

So the ranks communicate once for each pair: they sum the results of the second matrix. gate_up and
down divide the intermediate size in the same way. The embedding and the head divide the vocabulary.

divide() turns the config of a model into the config of one rank: numbers of heads and sizes are
those of the rank, and `part` says which rows and columns of the checkpoint they are. The layers
(layers.py) do the rest. This module uses neither tensors nor processes.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config import ModelConfig, Share, Shares
from octavo.errors import ModelError


def divide(config: ModelConfig, rank: int, num_ranks: int, group_size: int = 1) -> ModelConfig:
    """Return the config of one rank.

    `group_size` is the number of neighbouring inputs that share a scale in quantised weights, which
    are never divided.
    """
    if num_ranks == 1:
        return config
    query_heads, kv_heads = divide_heads(config, rank, num_ranks)
    intermediate = divide_intermediate(config.intermediate_size, group_size, rank, num_ranks)
    head_dim = config.head_dim
    return replace(
        config,
        num_heads=len(query_heads),
        num_kv_heads=len(kv_heads),
        intermediate_size=len(intermediate),
        part=Shares(
            query=Share((scaled(query_heads, head_dim),), config.num_heads * head_dim),
            key=Share((scaled(kv_heads, head_dim),), config.num_kv_heads * head_dim),
            intermediate=Share((intermediate,), config.intermediate_size),
            vocabulary=divide_vocabulary(config.vocab_size, rank, num_ranks),
        ),
    )


def divide_all(config: ModelConfig, num_ranks: int, group_size: int = 1) -> list[ModelConfig]:
    """Return the config of every rank. Raises ModelError if one of them would have nothing."""
    return [divide(config, rank, num_ranks, group_size) for rank in range(num_ranks)]


def divide_heads(config: ModelConfig, rank: int, num_ranks: int) -> tuple[range, range]:
    """Return the query heads and the KV heads of a rank.

    A rank has complete groups of query heads with their KV heads. If there are fewer KV heads than
    ranks, several ranks hold the same KV head and divide its query heads.
    """
    group_size = config.num_heads // config.num_kv_heads
    if num_ranks <= config.num_kv_heads:
        kv_heads = split_range(config.num_kv_heads, rank, num_ranks)
        return scaled(kv_heads, group_size), kv_heads
    for kv_head in range(config.num_kv_heads):
        ranks_of_kv_head = split_range(num_ranks, kv_head, config.num_kv_heads)
        if rank not in ranks_of_kv_head or len(ranks_of_kv_head) > group_size:
            continue
        heads_in_group = split_range(
            group_size, rank - ranks_of_kv_head.start, len(ranks_of_kv_head)
        )
        first = kv_head * group_size
        query_heads = range(first + heads_in_group.start, first + heads_in_group.stop)
        return query_heads, range(kv_head, kv_head + 1)
    raise ModelError(
        f"tensor_parallel_size {num_ranks} is too large: the model has {config.num_heads} heads, "
        f"which {num_ranks} ranks cannot divide. Use at most {config.num_heads}"
    )


def divide_intermediate(size: int, group_size: int, rank: int, num_ranks: int) -> range:
    groups = split_range(-(-size // group_size), rank, num_ranks)
    if not groups:
        raise ModelError(
            f"tensor_parallel_size {num_ranks} is too large: the intermediate size {size} has "
            f"{-(-size // group_size)} groups of {group_size} quantised weights, and every rank "
            "needs one. Use fewer ranks, or a format with smaller groups"
        )
    return range(groups.start * group_size, min(groups.stop * group_size, size))


def divide_vocabulary(size: int, rank: int, num_ranks: int) -> Share:
    """Return the tokens of a rank. Every rank but the last has the same number of tokens."""
    width = -(-size // num_ranks)
    tokens = range(rank * width, min((rank + 1) * width, size))
    if not tokens:
        raise ModelError(
            f"tensor_parallel_size {num_ranks} is too large: the vocabulary has {size} tokens, "
            "and one rank would have none. Use fewer ranks"
        )
    return Share((tokens,), size)


def split_range(total: int, index: int, count: int) -> range:
    """Return one of `count` parts of range(total). The sizes of the parts differ by at most one,
    and the first part is the largest."""
    return range(-(-total * index // count), -(-total * (index + 1) // count))


def scaled(numbers: range, factor: int) -> range:
    return range(numbers.start * factor, numbers.stop * factor)
