"""Checks of a request before it is queued, and the sequence that it becomes.

The checks depend on the limits of the engine, not on other requests. Admission is a decision of the
scheduler.
"""

from __future__ import annotations

import math
import sys
from array import array

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.bounded_kv import max_kv_positions
from octavo.errors import ContextLengthExceeded, InvalidRequest, KVCapacityExceeded
from octavo.params import check_integer, check_real
from octavo.types import Beam, Request, Sequence


def new_sequence(
    request: Request,
    id: int,
    seed: int,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    vocab_size: int,
    eos_ids: frozenset[int],
) -> Sequence:
    """Return a request's first sequence. Raises InvalidRequest for a request that can never run.

    `seed` is used if the request's parameters name none."""
    params = request.params
    _check_prompt(request, vocab_size)
    check_integer("priority", request.priority, -(2**31), 2**31 - 1)
    if request.deadline is not None:
        check_real("deadline", request.deadline, -math.inf, math.inf)
    params.check_vocabulary(vocab_size)
    if params.structured_outputs is not None and request.guide is None:
        raise InvalidRequest(
            "structured_outputs need a compiled guide: compile them first (octavo/text/guide.py)"
        )
    stop_ids = _stop_ids(request, eos_ids)
    token_limit = _token_limit(request, cache, schedule)
    if params.use_beam_search:
        _check_beams(request, cache, len(stop_ids), vocab_size)
    seq = Sequence(
        id=id,
        request=request,
        index=0,
        tokens=array("i", request.prompt),
        prompt_len=len(request.prompt),
        token_limit=token_limit,
        seed=params.seed if params.seed is not None else seed,
        stop_ids=stop_ids,
        guide=None if request.guide is None else request.guide.copy(),
        repetition=params.repetition,
    )
    if params.use_beam_search:
        seq.beam = Beam()
    else:
        seq.pending_forks = params.width - 1
    if params.prompt_logprobs is not None:
        seq.prompt_logprobs = [None] * len(request.prompt)
    return seq


def _check_prompt(request: Request, vocab_size: int) -> None:
    prompt = request.prompt
    if not prompt:
        raise InvalidRequest("the prompt is empty: at least one token is needed", "prompt")
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= vocab_size:
        invalid = next(
            token for token in prompt if type(token) is not int or not 0 <= token < vocab_size
        )
        raise InvalidRequest(
            f"prompt holds token id {invalid!r}, but ids are integers in 0..{vocab_size - 1}",
            "prompt",
        )
    try:
        request.cache_salt.encode()
    except (UnicodeEncodeError, AttributeError):
        raise InvalidRequest(
            "cache_salt must be a string of valid Unicode, without lone surrogates", "cache_salt"
        ) from None


def _stop_ids(request: Request, eos_ids: frozenset[int]) -> frozenset[int]:
    params = request.params
    # ignore_eos does not apply to a guide, which defines where its text may end.
    ignores_eos = params.ignore_eos and request.guide is None
    if params.trace_decode_token_ids is not None:  # the replay ends with its last token
        ignores_eos = True
    stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if ignores_eos else eos_ids)
    params.check_min_tokens(stop_ids)
    return stop_ids


def _token_limit(request: Request, cache: CacheConfig, schedule: ScheduleConfig) -> int:
    """Return the number of tokens the sequence may grow to. It must fit the context, the sequence's
    own KV budget and the block pool."""
    length = len(request.prompt)
    kept_positions = max_kv_positions(cache)
    block_size = cache.block_size
    room = schedule.max_model_len - length
    if request.pooling is not None:
        room += 1  # no token is generated
    if room < 1:
        left = "" if request.pooling is not None else ", and at least one is needed for the reply"
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens, but the context holds {schedule.max_model_len}{left}"
            ": shorten the prompt or raise max_model_len"
        )
    if length > kept_positions:
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens, but a sequence keeps {kept_positions}: "
            "shorten the prompt or raise kv_budget"
        )
    max_tokens = request.params.max_tokens or room
    is_bounded = kept_positions != sys.maxsize
    limit = length + (max_tokens if is_bounded else min(room, max_tokens))
    # The last token is sampled and never computed.
    num_blocks = -(-min(limit - 1, kept_positions) // block_size)
    if num_blocks > cache.num_blocks:
        largest = max(cache.num_blocks * block_size + 1 - length, 0)
        raise KVCapacityExceeded(
            f"request {request.id!r} needs {num_blocks} KV blocks of {block_size} for {length} "
            f"prompt and {limit - length} new tokens, but the pool has {cache.num_blocks}: "
            f"lower max_tokens to {largest} or enlarge the pool"
        )
    return limit


def _check_beams(request: Request, cache: CacheConfig, num_stop_ids: int, vocab_size: int) -> None:
    if cache.kv_eviction != "none":
        raise InvalidRequest(
            "beam search does not work with bounded KV: use kv_eviction none, or no beam search",
            "use_beam_search",
        )
    width = request.params.width
    obstacle = ""
    if request.guide is not None:
        obstacle = "structured_outputs"
    elif width + num_stop_ids > vocab_size:
        obstacle = f"{num_stop_ids} stop tokens in a vocabulary of {vocab_size}"
    if obstacle:
        raise InvalidRequest(
            f"{width} beams are not possible with {obstacle}: use fewer beams, or none",
            "use_beam_search",
            "unsupported_parameter",
        )
