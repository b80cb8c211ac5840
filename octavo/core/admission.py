"""What a request must be to be queued, and the sequence that it becomes. Knows the limits, not who else is there."""

from __future__ import annotations

import math
import sys
from array import array

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.bounded_kv import most_positions
from octavo.errors import ContextLengthExceeded, InvalidRequest, KVCapacityExceeded
from octavo.params import check_real, check_whole
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
    """Raises InvalidRequest for what can never run. `seed`: of a request that names none."""
    params = request.params
    _check_prompt(request, vocab_size)
    check_whole("priority", request.priority, -(2**31), 2**31 - 1)
    if request.deadline is not None:
        check_real("deadline", request.deadline, -math.inf, math.inf)
    params.check_vocabulary(vocab_size)
    if params.structured_outputs is not None and request.guide is None:
        raise InvalidRequest(
            "structured_outputs come with a guide: compile them first (octavo/text/guide.py)"
        )
    endless = params.ignore_eos and request.guide is None  # what a guide leads to its end has ended
    stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if endless else eos_ids)
    if (
        params.min_tokens
        and params.allowed_token_ids is not None
        and stop_ids.issuperset(params.allowed_token_ids)
    ):
        raise InvalidRequest(
            "allowed_token_ids are all stop tokens, which min_tokens forbids: nothing could be said",
            "min_tokens",
        )
    limit = _limit(request, cache, schedule)
    if params.use_beam_search:
        _check_beams(request, cache, len(stop_ids), vocab_size)
    seed = params.seed if params.seed is not None else seed
    seq = Sequence(
        id, request, 0, array("i", request.prompt), len(request.prompt), limit, seed, stop_ids
    )
    seq.guide = None if request.guide is None else request.guide.copy()
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
        bad = next(t for t in prompt if type(t) is not int or not 0 <= t < vocab_size)
        raise InvalidRequest(
            f"prompt holds token id {bad!r}, but ids are integers in 0..{vocab_size - 1}", "prompt"
        )
    try:
        request.cache_salt.encode()
    except (UnicodeEncodeError, AttributeError):
        raise InvalidRequest(
            "cache_salt must be a string of valid Unicode, without lone surrogates", "cache_salt"
        ) from None


def _limit(request: Request, cache: CacheConfig, schedule: ScheduleConfig) -> int:
    """Tokens that it may grow to, where they fit into the context, into its own cache and into the pool."""
    length, most, size = len(request.prompt), most_positions(cache), cache.block_size
    room = schedule.max_model_len - length
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens, but the context holds {schedule.max_model_len} and one "
            "must be left to generate: shorten the prompt or raise max_model_len"
        )
    if length > most:
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens, but a sequence keeps {most}: shorten the prompt or raise kv_budget"
        )
    wanted = request.params.max_tokens or room
    limit = length + (min(room, wanted) if most == sys.maxsize else wanted)
    need = -(-min(limit - 1, most) // size)  # the last token is sampled and never computed
    if need > cache.num_blocks:
        raise KVCapacityExceeded(
            f"request {request.id!r} needs {need} KV blocks of {size} for {length} prompt and {limit - length} new tokens, but "
            f"the pool has {cache.num_blocks}: lower max_tokens to {max(cache.num_blocks * size + 1 - length, 0)} or enlarge the "
            "pool"
        )
    return limit


def _check_beams(request: Request, cache: CacheConfig, stops: int, vocab_size: int) -> None:
    if cache.kv_eviction != "none":
        raise InvalidRequest(
            "beams cannot go on in bounded caches: use kv_eviction none, or no beams",
            "use_beam_search",
        )
    width = request.params.width
    if request.guide is not None or width + stops > vocab_size:
        why = (
            "a guide"
            if request.guide is not None
            else f"{stops} stop tokens in a vocabulary of {vocab_size}"
        )
        raise InvalidRequest(
            f"{width} beams are not possible with {why}", "use_beam_search", "unsupported_parameter"
        )
