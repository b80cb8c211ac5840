"""The in-process API: text in, text out, around the engine's loop. Names and shapes are those of vLLM's offline class.

    llm = LLM()                                   the embedded model; or a directory, a .gguf file, a hub name
    llm.generate(["Hello"], SamplingParams())     many prompts, batched
    llm.chat([{"role": "user", "content": "Hi"}])
    for piece in llm.stream("Once upon a time"):  pieces as they come

One thread at a time may call it.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch

from octavo.collect import Collector
from octavo.config import CacheConfig, ModelConfig, ScheduleConfig
from octavo.core.batching import check_batching
from octavo.core.bounded_kv import check_kv_eviction, max_kv_positions
from octavo.core.engine import Engine
from octavo.core.policy import find_policy
from octavo.core.scheduler import Scheduler
from octavo.core.trace import Recorder
from octavo.errors import InvalidRequest, ModelError, NotEnoughMemory, OctavoError
from octavo.memory import (
    BLOCK_SIZE,
    DISK_GIB,
    KV_BUDGET,
    STAGING,
    MemoryPlan,
    activation_bytes,
    available_memory,
    check_disk,
    default_piggyback_tokens,
    graph_bytes,
    kv_memory,
    parameter_count,
    parse_kv_dtype,
    size_pool,
    size_tiers,
    step_tokens,
    weight_bytes,
)
from octavo.model.base import CausalLM
from octavo.model.checkpoint import Checkpoint, read_json
from octavo.model.fingerprint import fingerprint
from octavo.model.load import LoadOptions, load_model
from octavo.ops import select
from octavo.ops.kv import LARGEST, dtype_name
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from octavo.params import (
    BeamSearchParams,
    SamplingParams,
    check_real,
    check_whole,
    recommended_sampling,
)
from octavo.runner.canary import Canary
from octavo.runner.disk import Disk
from octavo.runner.kvstore import KVStore
from octavo.runner.runner import Runner
from octavo.runner.shapes import RunnerLimits, held_logits
from octavo.runner.tier_store import TierStore
from octavo.text.chat import check_options, encode_chat, select_template
from octavo.text.guide import Guides
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output, Request

log = logging.getLogger(__name__)

# A model's vocabulary is often padded to a round number: by 2% in Phi's, less in others'.
PADDED_VOCABULARY = 0.8
P = ParamSpec("P")
T = TypeVar("T")

Message: TypeAlias = dict[str, Any]
# text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}
Prompt: TypeAlias = str | list[int] | dict[str, Any]
# its text, if it had any; its ids; its cache salt
Read: TypeAlias = tuple[str | None, list[int], str]

PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "parse_special"}  # of a dictionary
# Options of vLLM's class that ask for nothing this engine would do otherwise; others are refused by name.
HARMLESS = {
    "trust_remote_code", "cpu_offload_gb", "disable_log_stats", "enable_chunked_prefill", "max_seq_len_to_capture",
    "disable_custom_all_reduce", "tokenizer_mode", "disable_async_output_proc", "use_v2_block_manager", "compilation_config",
    "async_scheduling", "hf_token", "max_logprobs",
}  # fmt: skip
# Others are taken at the value that changes nothing.
DEFAULTS = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_lora": False}
# Tokens of prompts that warm_up computes, as far as they fit: steps of such sizes may take kernels of their own.
WARM_UP = {"cuda": (64, 128, 768, 2048, sys.maxsize), "cpu": (64,)}


def mends(method: Callable[Concatenate[LLM, P], T]) -> Callable[Concatenate[LLM, P], T]:
    """Of what calls the engine: where that breaks off half-way, by Ctrl-C or a fault of its own, it can still be used."""

    @functools.wraps(method)
    def run(llm: LLM, *args: P.args, **options: P.kwargs) -> T:
        llm.engine.handled_interrupt = None
        try:
            return method(llm, *args, **options)
        except OctavoError:  # which change nothing
            raise
        except BaseException as error:
            if llm.engine.handled_interrupt is not error:
                llm._renew()
                llm.engine.handled_interrupt = error
            raise

    return run


class LLM:
    def __init__(
        self,
        model: str | Path | dict[str, Any] | None = None,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        parse_special: bool = True,
        generation_config: str | Path = "auto",
        override_generation_config: dict[str, Any] | None = None,
        dtype: str = "auto",
        seed: int = 0,
        revision: str | None = None,
        load_format: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        swap_space: float | None = None,
        kv_disk_path: str | Path | None = None,
        kv_disk_gib: float = DISK_GIB,
        kv_eviction: str = "none",
        kv_budget: int | None = None,
        kv_sinks: int = 1,
        enforce_eager: bool = False,
        depth: int | None = None,
        scheduling_policy: str = "fcfs",
        batching: str = "continuous",
        max_batch: int = 8,
        window_ms: float = 20.0,
        target_ms: float = 50.0,
        short_prompt_share: float = 0.25,
        piggyback_tokens: int | None = None,
        record_trace: str | Path | None = None,
        kv_canary: bool = False,
        progress: bool | Callable[[float], None] = True,
        **options: Any,
    ):
        unknown = sorted(
            k
            for k, v in options.items()
            if k not in HARMLESS and (k not in DEFAULTS or v != DEFAULTS[k])
        )
        if unknown:
            raise InvalidRequest(
                f"LLM does not know how to honour: {', '.join(unknown)}. Leave them out", unknown[0]
            )
        if options:
            log.info("options without effect here: %s", ", ".join(sorted(options)))
        check_whole("depth", 1 if depth is None else depth, 1, 3)  # steps in flight
        check_whole("max_num_seqs", max_num_seqs, 1)
        policy = find_policy(scheduling_policy)
        check_batching([batching], max_batch, window_ms, target_ms)
        check_real("short_prompt_share", short_prompt_share, 0, 1)
        check_whole("piggyback_tokens", piggyback_tokens or 0, 0)
        if piggyback_tokens and (batching != "continuous" or scheduling_policy != "fcfs"):
            raise InvalidRequest(
                "piggyback_tokens has no effect here: it needs batching continuous and "
                "scheduling_policy fcfs. Leave it out",
                "piggyback_tokens",
            )
        check_whole("seed", seed, -(2**63), 2**63 - 1)
        check_real("gpu_memory_utilization", gpu_memory_utilization, 0, 1, open_low=True)
        check_real("swap_space", 0 if swap_space is None else swap_space, 0, 2**20)
        check_disk(kv_disk_path, kv_disk_gib)
        if not enable_prefix_caching and (swap_space or kv_disk_path is not None):
            raise InvalidRequest(
                "swap_space and kv_disk_path keep what the prefix cache has: leave it enabled",
                "swap_space",
            )
        if kv_canary and (swap_space or kv_disk_path is not None or kv_eviction != "none"):
            raise InvalidRequest(
                "kv_canary knows plain KV on the device: leave out swap_space, kv_disk_path, kv_eviction",
                "kv_canary",
            )
        sizes = {
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
        }
        for name, value in {**sizes, "num_gpu_blocks_override": num_gpu_blocks_override}.items():
            if value is not None:
                check_whole(name, value, 2 if name == "max_model_len" else 1)
        recommended = _read_generation_config(generation_config)
        kv_asked = parse_kv_dtype(kv_cache_dtype)
        self._close: weakref.finalize[[], LLM] | None = None
        self.device = _pick_device(device)
        on_gpu = self.device.type == "cuda"
        block_size = block_size or BLOCK_SIZE[self.device.type]
        ops = select(self.device.type)
        if dtype == "auto" and not on_gpu:
            # exact, and as fast on CPUs without 16-bit instructions; docs/models.md has numbers
            dtype = "float32"
        self.model, self.checkpoint = load_model(
            model,
            LoadOptions(
                dtype=dtype,
                device=str(self.device),
                load_format=load_format,
                quantization=quantization,
                revision=revision,
                seed=seed,
            ),
            ops=ops,
            progress=progress,
            available=available_memory(self.device)[0],
        )
        self.config: ModelConfig = self.model.config
        if recommended is None:
            recommended = self.checkpoint.generation_config
        self.default_sampling = _default_sampling(
            {**recommended, **(override_generation_config or {})}
        )
        self.parse_special = parse_special
        self.tokenizer = (
            None
            if skip_tokenizer_init
            else _load_tokenizer(tokenizer, self.checkpoint, self.config.vocab_size)
        )
        ends = self.tokenizer.end_ids if self.tokenizer else ()
        self.eos_ids = tuple(sorted({*self.config.eos_ids, *ends}))
        self.model_dtype = self.model.dtype
        self.kv_dtype = _pick_kv_dtype(kv_asked, self.model)
        kv_name = dtype_name(self.kv_dtype)
        parameters = parameter_count(self.model)
        weights = weight_bytes(self.model)
        budget = max_num_batched_tokens or step_tokens(self.device.type, parameters, max_num_seqs)
        schedule = ScheduleConfig(
            max_num_seqs,
            budget,
            # an urgent request waits for all that are in flight
            depth=depth or (2 if on_gpu and not policy.preemptive else 1),
            policy=scheduling_policy,
            batching=batching,
            max_batch=max_batch,
            batch_window=window_ms / 1e3,
            latency_target=target_ms / 1e3,
            short_prompt_share=short_prompt_share,
            piggyback_tokens=(
                default_piggyback_tokens(self.device.type, parameters, weights)
                if piggyback_tokens is None
                else piggyback_tokens
            ),
        )
        activations = activation_bytes(self.config, schedule, dtype_name(self.model_dtype))
        graphs = ops.name == "triton" and on_gpu and not enforce_eager and not kv_canary
        if graphs:
            activations += graph_bytes(
                self.config, held_logits(max_num_seqs, budget), dtype_name(self.model_dtype)
            )
        staging = STAGING[self.device.type] if swap_space or kv_disk_path is not None else 0
        kv_bytes = kv_memory(self.device, gpu_memory_utilization, activations + staging)
        cache, max_model_len = size_pool(
            self.config,
            block_size,
            kv_name,
            kv_bytes,
            max_num_seqs,
            max_model_len,
            num_gpu_blocks_override,
        )
        self.schedule = replace(schedule, max_model_len=max_model_len)
        cache = self._bound(cache, kv_eviction, kv_budget, kv_sinks, max_model_len)
        kv_token = self.config.kv_bytes_per_token(kv_name)
        spare = available_memory(torch.device("cpu"))[0]
        taken = 0 if on_gpu else cache.num_blocks * block_size * kv_token
        if taken > spare:
            raise NotEnoughMemory(
                f"a KV pool of {cache.num_blocks} blocks takes {taken / 2**30:.3g} GiB, but {spare / 2**30:.3g} GiB of memory "
                "are left: lower num_gpu_blocks_override (--num-blocks)"
            )
        host_blocks, disk_bytes = size_tiers(
            swap_space, kv_disk_path, kv_disk_gib, block_size * kv_token, spare - taken
        )
        self.cache = replace(
            cache, prefix_caching=enable_prefix_caching, block_bytes=block_size * kv_token
        )
        kv = KVStore(self.config, self.cache, self.kv_dtype, self.device)
        tiers = None
        if host_blocks:
            disk = (
                self._open_disk(Path(kv_disk_path).expanduser(), disk_bytes, kv, kv_name)
                if kv_disk_path is not None
                else None
            )
            tiers = self._make_tiers(kv, host_blocks, disk, staging)
        if tiers is None:
            host_blocks = disk_bytes = 0
        self.cache = replace(self.cache, host_blocks=host_blocks, has_disk=disk_bytes > 0)
        self.memory = MemoryPlan(
            weights, activations, kv_token, block_size, cache.num_blocks, host_blocks, disk_bytes
        )
        canary = (
            Canary(cache.num_blocks, block_size, max_model_len, self.device) if kv_canary else None
        )
        self.runner = Runner(
            model=self.model,
            kv=kv,
            limits=RunnerLimits(max_slots=max_num_seqs, max_len=max_model_len, max_tokens=budget),
            use_graphs=graphs,
            tiers=tiers,
            canary=canary,
            is_bounded=kv_eviction != "none",
        )
        self.seed = seed
        self.engine = self.new_engine(self.schedule)
        if record_trace is not None:
            self.engine.scheduler.recorder = Recorder(record_trace)
        self.guides = Guides(self.tokenizer, self.config.vocab_size, self.eos_ids)
        self._open: dict[str, Collector] = {}
        self._dropped: list[str] = []  # requests whose stream nobody holds any more
        self._count = 0

    def new_engine(self, schedule: ScheduleConfig) -> Engine:
        """An engine for this model, nothing cached yet. Only one at a time may run: they share the device's rows and blocks."""
        scheduler = Scheduler(self.cache, schedule, self.config.vocab_size, self.eos_ids, self.seed)
        tiers = self.runner.tiers
        if scheduler.tiers is not None and tiers is not None and tiers.disk is not None:
            scheduler.tiers.attach_store(tiers.disk.known_hashes, tiers.fetch_ids)
        return Engine(scheduler, self.runner)

    def _bound(
        self, cache: CacheConfig, eviction: str, budget: int | None, sinks: int, max_model_len: int
    ) -> CacheConfig:
        """What leaves the cache of a sequence that has grown to its budget, if anything does."""
        check_whole("kv_sinks", sinks, 0)
        if budget is not None:
            check_whole("kv_budget", budget, 1)
            if eviction == "none":
                raise InvalidRequest(
                    "kv_budget bounds nothing here: say what leaves, kv_eviction sinks or heavy",
                    "kv_budget",
                )
        if eviction == "none" and sinks != cache.kv_sinks:
            raise InvalidRequest(
                "kv_sinks has no effect here: nothing leaves with kv_eviction none", "kv_sinks"
            )
        if budget is None:
            budget = min(KV_BUDGET, max_model_len) // cache.block_size * cache.block_size
        cache = replace(cache, kv_eviction=eviction, kv_budget=budget, kv_sinks=sinks)
        check_kv_eviction(cache, max_model_len)
        if eviction != "none" and self.model.angles(0) is None:
            raise InvalidRequest(
                f"kv_eviction {eviction} moves keys to other positions, which this {self.config.architecture} does not allow: "
                "its positions are learned, or its rope scaling is dynamic. Use kv_eviction none",
                "kv_eviction",
            )
        if eviction != "none" and self.kv_dtype in LARGEST:
            raise InvalidRequest(
                f"kv_eviction {eviction} moves keys to other positions, and compressed ones would lose by it each time: "
                "use kv_cache_dtype auto",
                "kv_eviction",
            )
        return cache

    def _open_disk(self, directory: Path, limit: int, kv: KVStore, kv_name: str) -> Disk:
        """What is on disk is this model's if the weights, the kernels and the layout of KV are the same."""
        form = f"{kv_name} {'x'.join(map(str, kv.tensor.shape[1:]))}"
        name = fingerprint(
            self.model, self.config, self.model_dtype, form, self.device.type, self.model.ops.name
        )
        return Disk(
            directory=directory,
            max_bytes=limit,
            fingerprint=name,
            block_format=form,
            block_bytes=kv.tensor[0].nbytes,
        )

    def _make_tiers(
        self, kv: KVStore, host_blocks: int, disk: Disk | None, staging_bytes: int
    ) -> TierStore | None:
        try:
            tiers = TierStore(kv, host_blocks, disk, staging_bytes)
        except (NotEnoughMemory, RuntimeError) as error:
            log.warning("going on without a second tier of KV: %s", error)
            return None
        # what waits to be written is, at the interpreter's end too
        self._close = weakref.finalize(self, tiers.close)
        return tiers

    def close(self) -> None:
        """Write to disk what an engine that is idle has in its cache, as far as it fits into host memory at once, and end the
        threads that do it. Nothing to do without a disk."""
        if self._close is None or not self._close.alive:
            return
        try:
            # steps on their way for who was interrupted
            while not self.engine.idle and not self.engine.scheduler.live:
                self.step()
            if self.engine.idle:
                plan = self.engine.scheduler.flush()
                self.engine.scheduler.commit(plan, self.runner.launch(plan).wait())
        finally:
            self._close()

    # ---- whole answers -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | list[Prompt] | Any = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        lora_request: None = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, batched. One set of parameters for all, or one each. Order is kept. `priority`: one for each
        prompt, lower ones come sooner; needs scheduling_policy="priority"."""
        if lora_request is not None:
            raise InvalidRequest(
                "adapters are not supported: leave lora_request out", "lora_request"
            )
        if prompts is None:
            if prompt_token_ids is None:
                raise InvalidRequest(
                    "give prompts: text, token ids, or a list of either", "prompts"
                )
            prompts = prompt_token_ids
        return self._run(
            [self._read(p) for p in _as_list(prompts)], sampling_params, use_tqdm, priority
        )

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once. `template` options: chat_template, add_generation_prompt,
        continue_final_message, tools, chat_template_kwargs."""
        many: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        return self._run(
            [(None, self.encode_chat(m, **template), "") for m in many], sampling_params, use_tqdm
        )

    def beam_search(
        self,
        prompts: Prompt | list[Prompt] | Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest texts after each prompt, as beam search finds them. `concurrency_limit` is taken, and has no effect: how
        many fit at once is the scheduler's business."""
        if lora_request is not None:
            raise InvalidRequest(
                "adapters are not supported: leave lora_request out", "lora_request"
            )
        found = self._run([self._read(p) for p in _as_list(prompts)], params.sampling(), use_tqdm)
        return [
            BeamSearchOutput([self._beam(out, c, params) for c in out.outputs], out.error)
            for out in found
        ]

    def _beam(
        self, output: RequestOutput, found: CompletionOutput, params: BeamSearchParams
    ) -> BeamSearchSequence:
        hidden = found.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = output.prompt_token_ids + (found.token_ids[:-1] if hidden else found.token_ids)
        text = (
            None
            if self.tokenizer is None
            else self.tokenizer.decode(tokens, skip_special_tokens=False)
        )
        score = found.cumulative_logprob or 0.0
        return BeamSearchSequence(
            tokens, found.logprobs or [], score, text, found.finish_reason, found.stop_reason
        )

    def encode_chat(
        self,
        messages: list[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation."""
        tokenizer = self._need_tokenizer()
        template = select_template(tokenizer, chat_template, bool(tools))
        options = chat_template_kwargs or {}
        check_options(options)
        unused = template.unused(options)
        if unused:
            log.warning("the chat template does not use %s: it has no effect", ", ".join(unused))
        return encode_chat(
            tokenizer,
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )

    # ---- pieces as they come -----------------------------------------------------------------------

    def stream(
        self, prompt: Prompt | list[Message], sampling_params: SamplingParams | None = None
    ) -> Stream:
        """Complete one prompt (or conversation), yielding what is new after each step. Leaving the loop ends the request;
        several streams may be open at once, and are then computed together."""
        arrival = time.monotonic()
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            read: Read = None, self.encode_chat(prompt), ""
        else:
            read = self._read(prompt)  # type: ignore[arg-type]
        params = sampling_params or self.get_default_sampling_params()
        self._check(params)
        if params.ranked:
            name = "use_beam_search" if params.use_beam_search else "best_of"
            raise InvalidRequest(
                f"{name} cannot be streamed: which is best is known at the end",
                name,
                "unsupported_parameter",
            )
        self._count += 1
        return Stream(self, self._submit(read, params, arrival, self._count - 1))

    @mends
    def reset_prefix_cache(self) -> None:
        """Forget every cached prompt, as if the engine had just started: what is on disk can be found again."""
        self.engine.scheduler.clear_cache()

    def warm_up(self) -> None:
        """Compile and capture ahead of the first request, so that what comes later does not stall for it."""
        scheduler = self.engine.scheduler
        observers = self.engine.observers
        recorder = scheduler.recorder
        scheduler.recorder = None
        self.engine.observers = []  # nobody is to learn from steps that compile
        links = None if scheduler.tiers is None else replace(scheduler.tiers.costs)
        asked = scheduler.counters.queried_tokens, scheduler.counters.cached_tokens
        most = (
            min(self.schedule.max_model_len, self.memory.kv_tokens, max_kv_positions(self.cache))
            - 2
        )
        try:
            most = max(1, min(most, self.schedule.max_num_batched_tokens))
            for tokens in sorted({min(size, most) for size in WARM_UP[self.device.type]}):
                params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
                self.generate([[0] * tokens], params, use_tqdm=False)
                self.reset_prefix_cache()
        finally:
            if self.engine.scheduler is scheduler:
                self.engine.observers = observers
            self.engine.scheduler.recorder = recorder
            scheduler.counters.queried_tokens, scheduler.counters.cached_tokens = asked
            if scheduler.tiers is not None and links is not None:
                scheduler.tiers.costs = links
        self.runner.capture()

    # ---- the loop ----------------------------------------------------------------------------------

    def _renew(self) -> None:
        """An engine with empty books in place of one whose books may be half-written. What it was working on ends."""
        log.warning(
            "the engine was interrupted where its books may be half-written: it begins anew, with nothing cached"
        )
        before = self.engine.scheduler
        self.engine = self.new_engine(self.schedule)
        self.engine.scheduler.recorder = before.recorder
        self.engine.scheduler.arrivals = before.arrivals
        for id, collector in self._open.items():
            for index, completion in enumerate(collector.outputs):
                if completion.finish_reason is None:
                    collector.take(
                        Output(
                            id, index, [], finish_reason="error", error="the engine was interrupted"
                        )
                    )
            collector.open = 0  # also if it was being told of an end
        self._open.clear()

    @mends
    def step(self) -> list[RequestOutput]:
        """One step of the engine. Returns the requests that ended in it."""
        while self._dropped:
            self.abort(self._dropped.pop())
        return self._take(self.engine.step())

    @mends
    def abort(self, request_id: str) -> None:
        self._take(self.engine.abort(request_id))

    def _take(self, outputs: list[Output]) -> list[RequestOutput]:
        ended = []
        for out in outputs:
            collector = self._open.get(out.request_id)
            if collector is None:
                continue
            if collector.take(out):
                self.engine.stop(out.request_id, out.index)
            if collector.finished:
                del self._open[out.request_id]
                ended.append(collector.output())
        return ended

    def _run(
        self,
        prompts: list[Read],
        sampling_params: SamplingParams | list[SamplingParams] | None,
        use_tqdm: bool,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        arrival = time.monotonic()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(each)} sampling_params for {len(prompts)} prompts: give one for all, or one each"
            )
        urgency = [0] * len(prompts) if priority is None else priority
        if len(urgency) != len(prompts):
            raise InvalidRequest(
                f"{len(urgency)} priorities for {len(prompts)} prompts: give one each", "priority"
            )
        for one in {id(p): p for p in each}.values():
            self._check(one)
        mine: dict[str, Collector] = {}
        done: dict[str, RequestOutput] = {}
        first = self._count
        offline = len(prompts) > 1  # only the completion of the whole list counts
        self._count += len(prompts)
        try:
            for i in range(len(prompts)):
                mine[str(first + i)] = self._submit(
                    prompts[i], each[i], arrival, first + i, urgency[i], offline
                )
            with _Progress(len(mine), use_tqdm) as bar, _no_garbage_collection():
                while len(done) < len(mine):
                    for output in self.step():
                        if output.request_id in mine:
                            done[output.request_id] = output
                            bar.update(output)
        finally:
            # refused half-way, or interrupted: nothing stays behind
            for number in range(first, first + len(prompts)):
                if str(number) in self._open:
                    self.abort(str(number))
        failed = [output for output in done.values() if output.error]
        if failed:
            log.error(
                "%d of %d requests ended with an error: %s", len(failed), len(mine), failed[0].error
            )
        return [done[str(first + i)] for i in range(len(prompts))]

    def _check(self, params: SamplingParams) -> None:
        """What can be said of them without the prompt. One set may be that of many."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                "sampling_params",
            )
        params.validate()
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer: drop skip_tokenizer_init or use stop_token_ids",
                "stop",
            )

    def _submit(
        self,
        prompt: Read,
        params: SamplingParams,
        arrival: float,
        id: int,
        priority: int = 0,
        offline: bool = False,
    ) -> Collector:
        """`params` are checked."""
        text, ids, salt = prompt
        if priority and self.schedule.policy == "fcfs":
            raise InvalidRequest(
                'priority has no effect here: make the LLM with scheduling_policy="priority"',
                "priority",
            )
        guide = (
            None
            if params.structured_outputs is None
            else self.guides.compile(params.structured_outputs)
        )
        request = Request(
            id=str(id),
            prompt=ids,
            params=params,
            arrival=arrival,
            cache_salt=salt,
            priority=priority,
            guide=guide,
            offline=offline,
        )
        return self._add(request, text)

    @mends
    def _add(self, request: Request, text: str | None) -> Collector:
        self.engine.add(request)
        collector = self._open[request.id] = Collector(request, text, self.tokenizer)
        return collector

    def _read(self, prompt: Prompt) -> Read:
        """A prompt in any of its forms."""
        if isinstance(prompt, dict):
            given = {name: value for name, value in prompt.items() if value is not None}
            if unknown := sorted(given.keys() - PROMPT_KEYS):
                raise InvalidRequest(
                    f"a prompt cannot have {', '.join(unknown)}: this engine would ignore it",
                    "prompt",
                )
            if not given.keys() & {"prompt", "prompt_token_ids"}:
                raise InvalidRequest(
                    'a prompt dictionary needs "prompt" or "prompt_token_ids"', "prompt"
                )
            salt = str(given.get("cache_salt", ""))
            text = given.get("prompt")
            if "prompt_token_ids" in given:
                return text, _token_ids(given["prompt_token_ids"]), salt
            parse = given.get("parse_special", self.parse_special)
            return text, self._encode(given["prompt"], parse), salt
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, self.parse_special), ""
        return None, _token_ids(prompt), ""

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        """The tokens of a text prompt."""
        tokenizer = self._need_tokenizer()
        return tokenizer.as_prompt(tokenizer.encode(text, parse_special=parse_special))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "text needs a tokenizer: drop skip_tokenizer_init, or pass token ids", "prompt"
            )
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls that give none: what generation_config.json recommends, and for the rest SamplingParams'
        own defaults."""
        return SamplingParams(**self.default_sampling)

    def get_tokenizer(self) -> Tokenizer:
        return self._need_tokenizer()


class Stream(Iterator[CompletionOutput]):
    """The pieces of one request. Closing it, or dropping it, ends the request."""

    def __init__(self, llm: LLM, collector: Collector):
        self._llm = llm
        self._collector = collector
        self._news: list[CompletionOutput] = []
        collector.news = self._news

    def __next__(self) -> CompletionOutput:
        while not self._news:
            if self._collector.finished:
                raise StopIteration
            self._llm.step()
        return self._news.pop(0)

    def close(self) -> None:
        if not self._collector.finished:
            self._llm.abort(self._collector.request.id)
        self._news.clear()

    def __del__(self) -> None:
        """May come at any moment, in the middle of a step as well: the next step ends the request."""
        if not self._collector.finished:
            self._llm._dropped.append(self._collector.request.id)


class _Progress:
    """A bar over the requests of a call, if the call lasts long enough to want one."""

    def __init__(self, total: int, wanted: bool):
        self.bar: Any = None
        if wanted and total > 1:
            try:
                from tqdm import tqdm  # type: ignore[import-untyped]
            except ImportError:
                return
            self.bar = tqdm(total=total, desc="Generating", unit="request", delay=1.0, leave=False)
            self.tokens = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, output: RequestOutput) -> None:
        if self.bar is not None:
            self.tokens += sum(len(c.token_ids) for c in output.outputs)
            self.bar.set_postfix_str(f"{self.tokens} tokens", refresh=False)
            self.bar.update()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection walks every live object, some 10 ms at a thousand sequences, in the middle of a step. Nothing the loop
    makes is cyclic."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load_tokenizer(where: str | Path | None, checkpoint: Checkpoint, vocabulary: int) -> Tokenizer:
    """`vocabulary`: how many tokens the model has."""
    if where is not None:
        tokenizer = Tokenizer.from_directory(where)
    elif checkpoint.gguf_metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata)
    elif checkpoint.directory is not None:
        tokenizer = Tokenizer.from_directory(checkpoint.directory)
    else:
        raise ModelError(
            f"{checkpoint.source} has no tokenizer: give tokenizer=DIRECTORY (--tokenizer), or use token ids with "
            "skip_tokenizer_init=True"
        )
    if tokenizer.vocab_size < PADDED_VOCABULARY * vocabulary:
        log.warning(
            "the tokenizer has %s tokens and the model %s: tokens beyond the tokenizer's have no text. Is it this model's "
            "tokenizer?",
            f"{tokenizer.vocab_size:,}",
            f"{vocabulary:,}",
        )
    return tokenizer


def _read_generation_config(source: str | Path) -> dict[str, Any] | None:
    """`source` is vllm (no file), a directory with a generation_config.json, or auto (the model's own file: None)."""
    if source == "auto":
        return None
    if source == "vllm":
        return {}
    file = Path(source).expanduser() / "generation_config.json"
    if not file.is_file():
        raise InvalidRequest(
            f"generation_config must be auto, vllm or a directory with a generation_config.json, got {str(source)!r}",
            "generation_config",
        )
    return read_json(file)


def _default_sampling(config: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of requests that leave them out."""
    try:
        found = recommended_sampling(config)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"generation_config.json recommends a value that cannot be used: {error}. Use generation_config=vllm "
            "(--generation-config vllm), which leaves the file out",
            "generation_config",
        ) from None
    if found:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        log.info("sampling defaults from generation_config.json: %s", shown)
    return found


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many: a string, a dictionary and a flat list or array of ids are one."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"give prompts: text, token ids, or a list of either, got {prompts!r:.100}", "prompts"
        )
    many = list(prompts)
    several = not many or isinstance(many[0], (str, dict, list, tuple)) or _dimensions(many[0]) == 1
    return many if several else [many]


def _token_ids(prompt: Any) -> list[int]:
    """The ids of a list, a tuple, a NumPy array or a PyTorch tensor, as Python integers."""
    try:
        ids = prompt.tolist() if _dimensions(prompt) == 1 else prompt
        return [id if type(id) is int else id.__index__() for id in ids]
    except (TypeError, AttributeError):
        raise InvalidRequest(
            f"a prompt is text or a list of token ids, got {prompt!r:.80}", "prompt"
        ) from None


def _dimensions(value: Any) -> int:
    """Dimensions of a NumPy array or a PyTorch tensor. Any other value has none."""
    return getattr(value, "ndim", 0)


def _pick_kv_dtype(asked: str | None, model: CausalLM) -> torch.dtype:
    offered = {dtype_name(dtype): dtype for dtype in model.ops.kv_dtypes(model.dtype)}
    if asked is not None and asked not in offered:
        raise InvalidRequest(
            f"kv_cache_dtype {asked} cannot be used here: beside {dtype_name(model.dtype)} activations this device's kernels "
            f"read {', '.join(offered)}. Use one of those, or auto",
            "kv_cache_dtype",
        )
    return model.kv_dtype if asked is None else offered[asked]


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(
            f"unknown device {device!r}: use auto, cpu or cuda", "device"
        ) from None
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(
            "device cuda was asked for, but this machine has no usable NVIDIA GPU: use device='cpu'",
            "device",
        )
    return picked
