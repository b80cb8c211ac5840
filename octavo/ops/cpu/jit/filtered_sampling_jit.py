"""Samples a token from the likeliest ones only: those that min-p, top-k and top-p keep.

Each token has a key: its distance from the largest logit in logit units (octavo.ops), and the token
in the low bits, so a smaller key is likelier. The keys of the tokens near the largest logit are
collected in a heap and popped in order until enough are kept. For a trained model that is some
dozens of tokens out of the vocabulary.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types

from octavo.ops import LOGIT_UNITS_PER_TEMPERATURE, MAX_LOGIT_UNITS
from octavo.ops.cpu.jit.llvm_intrinsics import (
    FLOATS,
    LANES,
    POINTER,
    Emitter,
    Value,
    i64,
    inner,
    intrinsic,
    load_f32,
    load_i64,
    store_i64,
)
from octavo.ops.cpu.jit.sampling_jit import sample_token, score

INT = types.int64
FLOAT = types.float32

TOKEN_BITS = 20  # low bits of a key
TOKEN_MASK = 2**TOKEN_BITS - 1
# The first keys are those of tokens at least e^-8 times as likely as the likeliest token. If they
# are too few, the distance is multiplied.
FIRST_REACH = 8 * LOGIT_UNITS_PER_TEMPERATURE
REACH_FACTOR = 2


@intrinsic(INT, POINTER, FLOAT, FLOAT, FLOAT)
def mask_of_near(
    emitter: Emitter, logits: Value, largest: Value, units_per_logit: Value, reach: Value
) -> Value:
    """Return a bit for each of LANES logits: whether its distance may be at most `reach`."""
    distance = emitter.splat(largest) - emitter.load(logits, FLOATS)
    units = distance * emitter.splat(units_per_logit)
    # Some logits beyond `reach` may be included, because the distance is rounded afterwards.
    mask = units.compare("<=", emitter.splat(reach) * 1.00001).llvm
    bits = emitter.builder.bitcast(mask, ir.IntType(LANES))
    return Value(emitter, emitter.builder.zext(bits, i64))


@intrinsic(FLOAT, POINTER, INT, FLOAT, FLOAT)
def sum_weights(
    emitter: Emitter, logits: Value, vectors: Value, largest: Value, temperature: Value
) -> Value:
    """Return the sum of exp((logit - largest) / temperature) over LANES * vectors logits."""
    total = emitter.variable(emitter.constant(FLOATS, 0.0))
    with emitter.loop(vectors) as index:
        logit = emitter.load(logits + index * (4 * LANES), FLOATS)
        exponent = (logit - emitter.splat(largest)) / emitter.splat(temperature)
        total.set(total.get() + emitter.exp(exponent))
    return emitter.total(total.get())


@inner
def total_weight(logits: int, vocabulary: int, largest: float, temperature: float) -> float:
    vectors = vocabulary // LANES
    total = float(sum_weights(logits, vectors, largest, temperature))
    for token in range(vectors * LANES, vocabulary):
        total += math.exp((load_f32(logits + 4 * token) - largest) / temperature)
    return total


@inner
def weight_of(key: int) -> float:
    """Return how likely a token is, relative to the likeliest one."""
    return math.exp(-(key >> TOKEN_BITS) / LOGIT_UNITS_PER_TEMPERATURE)


@inner
def collect_keys(
    logits: int, vocabulary: int, largest: float, units_per_logit: float, reach: int, keys: int
) -> int:
    """Write the keys of all tokens within `reach` logit units to `keys`. Returns their number."""
    count = 0
    first_token = 0
    while first_token < vocabulary:
        mask = (1 << min(LANES, vocabulary - first_token)) - 1
        if first_token + LANES <= vocabulary:
            mask = mask_of_near(logits + 4 * first_token, largest, units_per_logit, FLOAT(reach))
        token = first_token
        while mask != 0:
            if mask & 1:
                distance = (largest - load_f32(logits + 4 * token)) * units_per_logit
                units = INT(min(distance, FLOAT(MAX_LOGIT_UNITS)))
                if units <= reach:
                    store_i64(keys + 8 * count, (units << TOKEN_BITS) | token)
                    count += 1
            mask >>= 1
            token += 1
        first_token += LANES
    return count


@inner
def sift_down(keys: int, root: int, count: int) -> None:
    """Move the key at `root` down, until no child in the heap keys[0:count] is smaller."""
    moved = load_i64(keys + 8 * root)
    child = 2 * root + 1
    while child < count:
        smallest = load_i64(keys + 8 * child)
        if child + 1 < count:
            right = load_i64(keys + 8 * (child + 1))
            if right < smallest:
                smallest = right
                child += 1
        if smallest >= moved:
            break
        store_i64(keys + 8 * root, smallest)
        root = child
        child = 2 * root + 1
    store_i64(keys + 8 * root, moved)


@inner
def pop_smallest(keys: int, count: int, max_popped: int, max_weight: float) -> int:
    """Pop keys from keys[0:count] in order, at least one, until there are `max_popped` or their
    weights sum to `max_weight`. The popped keys are at the end of the array, the smallest one last.
    Returns their number."""
    for root in range(count // 2 - 1, -1, -1):
        sift_down(keys, root, count)
    popped = 0
    weight = 0.0
    while popped == 0 or (popped < max_popped and weight < max_weight):
        smallest = load_i64(keys)
        weight += weight_of(smallest)
        popped += 1
        last = keys + 8 * (count - popped)
        store_i64(keys, load_i64(last))
        store_i64(last, smallest)
        sift_down(keys, 0, count - popped)
    return popped


@inner
def keep_top_p(keys: int, count: int, top_p: float) -> int:
    """Return how many of the last keys of keys[0:count], the smallest one last, reach top_p."""
    total = 0.0
    for index in range(count):
        total += weight_of(load_i64(keys + 8 * index))
    weight = 0.0
    for popped in range(1, count + 1):
        weight += weight_of(load_i64(keys + 8 * (count - popped)))
        if weight >= top_p * total:
            return popped
    return count


@inner
def keep_likely(
    logits: int,
    vocabulary: int,
    most_likely: int,
    temperature: float,
    top_k: int,
    top_p: float,
    max_distance: int,
    keys: int,
) -> tuple[int, int]:
    """Write the keys of the kept tokens to `keys`, which has room for all tokens. Returns the index
    of the first one and the index behind the last one."""
    largest = load_f32(logits + 4 * most_likely)
    units_per_logit = FLOAT(LOGIT_UNITS_PER_TEMPERATURE) / temperature
    has_min_p = max_distance < MAX_LOGIT_UNITS
    has_top_k = top_k < vocabulary
    farthest = max_distance if has_min_p else MAX_LOGIT_UNITS
    reach = farthest if has_min_p else FIRST_REACH
    total = math.inf
    if top_p < 1 and not has_top_k and not has_min_p:
        total = total_weight(logits, vocabulary, largest, temperature)
    while True:
        count = collect_keys(logits, vocabulary, largest, units_per_logit, reach, keys)
        is_enough = reach >= farthest or (has_top_k and count >= top_k)
        if not is_enough and not has_top_k:
            collected = 0.0
            for index in range(count):
                collected += weight_of(load_i64(keys + 8 * index))
            is_enough = collected >= top_p * total
        if is_enough:
            break
        reach = min(reach * REACH_FACTOR, farthest)
    if not has_top_k and top_p >= 1:
        return 0, count
    popped = pop_smallest(keys, count, min(top_k, count), top_p * total)
    if top_p < 1 and total == math.inf:
        popped = keep_top_p(keys + 8 * (count - popped), popped, top_p)
    return count - popped, count


@inner
def sample_kept(
    logits: int, keys: int, first: int, end: int, noise_key: int, temperature: float
) -> int:
    """Sample a token from those in keys[first:end]."""
    chosen = -1
    best = FLOAT(-math.inf)
    for index in range(first, end):
        token = load_i64(keys + 8 * index) & TOKEN_MASK
        token_score = score(load_f32(logits + 4 * token), token, noise_key, temperature)
        if chosen < 0 or token_score > best or (token_score == best and token < chosen):
            best = token_score
            chosen = token
    return chosen


@inner
def sample(
    logits: int,
    vocabulary: int,
    most_likely: int,
    noise_key: int,
    temperature: float,
    top_k: int,
    top_p: float,
    max_distance: int,
    keys: int,
) -> int:
    """Sample a token from logits [vocabulary]. The logit of `most_likely` is the largest, and
    `keys` is memory for as many int64."""
    if top_p < 1 or top_k < vocabulary or max_distance < MAX_LOGIT_UNITS:
        first, end = keep_likely(
            logits, vocabulary, most_likely, temperature, top_k, top_p, max_distance, keys
        )
        return sample_kept(logits, keys, first, end, noise_key, temperature)
    return sample_token(logits, vocabulary, most_likely, noise_key, temperature)
