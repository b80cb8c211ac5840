"""The in-process API: text in, text out. Names and shapes are those of vLLM's offline class.

    llm = LLM()                                   the embedded model; or a directory, a .gguf file,
                                                  a name on the hub
    llm.generate(["Hello"], SamplingParams())     many prompts, batched
    llm.chat([{"role": "user", "content": "Hi"}])
    for piece in llm.stream("Once upon a time"):  pieces as they are generated

One thread at a time may call it. The engine is built by assemble.py and driven by request_loop.py.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from octavo.assemble import (
    DeviceFacts,
    EngineFactory,
    ModelFacts,
    ModelOnDevice,
    ModelSource,
    Progress,
    agree_on_tiers,
    build_runner,
    load,
    load_tokenizer,
    resolve,
    settle_speculation,
    share_device,
    start_ranks,
    torch_dtype,
    with_drafter,
)
from octavo.collect import Collector
from octavo.config import ModelConfig, ScheduleConfig
from octavo.core.engine import Engine
from octavo.core.event_recorder import EventRecorder
from octavo.core.policy import ignores_priority
from octavo.core.trace import Recorder
from octavo.engine_options import (
    LOADING_OPTIONS,
    EngineKeywords,
    EngineOptions,
    from_keywords,
)
from octavo.errors import MEMORY_RAN_OUT, InvalidRequest, NotEnoughMemory, is_out_of_memory
from octavo.generation_config import default_sampling, read_generation_config
from octavo.llm_metrics import Metric, RequestTotals
from octavo.memory_planner import check_memory
from octavo.model.base import CausalLM
from octavo.model.checkpoint import Checkpoint
from octavo.model.weight_summary import summarize_weights
from octavo.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from octavo.params import BeamSearchParams, SamplingParams
from octavo.pooler_config import read_pooler_config
from octavo.pooling import (
    PoolingParams,
    Vector,
    cosine,
    pooled_vector,
    pooling_sampling,
)
from octavo.profiler import StepProfiler
from octavo.prompt_reader import Message, Prompt, PromptReader, ReadPrompt, as_list
from octavo.request_loop import RequestLoop, no_garbage_collection
from octavo.runner.drafter import Drafter
from octavo.runner.ranks import Ranks
from octavo.runner.runner import Runner
from octavo.stream_factory import StreamFactory, StreamText
from octavo.text.guide import Guides
from octavo.text.reasoning import detect_style, opened
from octavo.text.replay_guide import ReplayGuide
from octavo.text.tokenizer import Tokenizer
from octavo.types import Guide, Request
from octavo.warm_up import warm_up

log = logging.getLogger(__name__)
# Methods of vLLM's class that LLM does not have, and what to do instead.
MISSING_METHODS = {
    "llm_engine": "call LLM.step and LLM.stream, or make an octavo.LLMEngine",
    "apply_model": "the model is LLM.model, in this process",
    "collective_rpc": "the engine runs in this process, without workers",
    "classify": "Octavo has no models that classify: use LLM.embed or LLM.chat",
    "reward": "Octavo has no reward models: use LLM.embed or LLM.encode",
    "sleep": "delete the LLM to free its memory",
    "wake_up": "make a new LLM",
    "update_weights": "make a new LLM with the new weights",
    "enqueue": "call LLM.stream for each prompt, and LLM.step",
    "wait_for_completion": "call LLM.step until the requests have ended",
}


class LLM:
    def __init__(
        self,
        model: ModelSource = None,
        *,
        progress: Progress = True,
        **options: Unpack[EngineKeywords],
    ):
        """`options` are the fields of EngineOptions (octavo/engine_options.py). `progress` shows a
        bar while the weights are loaded, or is called with the fraction that is loaded."""
        self._start(model, from_keywords(dict(options)), progress)

    def __getattr__(self, name: str) -> Any:
        if name in MISSING_METHODS:
            raise AttributeError(f"LLM has no {name}: {MISSING_METHODS[name]}")
        raise AttributeError(f"'LLM' object has no attribute {name!r}")

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """Make an LLM with the values of an EngineArgs (octavo/compat/engine_args.py)."""
        return cls(**vars(engine_args))

    @classmethod
    def from_options(
        cls, model: ModelSource, options: EngineOptions, progress: Progress = True
    ) -> LLM:
        llm = cls.__new__(cls)
        llm._start(model, options, progress)
        return llm

    def _start(self, source: ModelSource, options: EngineOptions, progress: Progress) -> None:
        recommended = read_generation_config(options.generation_config)
        self.ranks = start_ranks(source, options)
        try:
            group = None if self.ranks is None else self.ranks.group
            loaded = load(source, options, progress, group, self._prepare(options))
            self._build(loaded, options, recommended)
        except BaseException as error:
            if self.ranks is not None:
                self.ranks.close()
            if is_out_of_memory(error):
                raise NotEnoughMemory(MEMORY_RAN_OUT) from error
            raise

    def _prepare(self, options: EngineOptions) -> Callable[[CausalLM, Checkpoint], None]:
        """Return what is done before the weights are read, so that a model without a tokenizer, or
        too large for the memory, is refused at once."""
        checks_memory = check_memory(options)

        def prepare(planned: CausalLM, checkpoint: Checkpoint) -> None:
            checks_memory(planned, checkpoint)
            self.tokenizer = load_tokenizer(checkpoint, planned.config.vocab_size, options)

        return prepare

    def _build(
        self, loaded: ModelOnDevice, options: EngineOptions, recommended: dict[str, Any] | None
    ) -> None:
        """Build everything but the model. `recommended` are sampling parameters that replace those
        of the checkpoint."""
        self.options = options
        self.model = loaded.model
        self.checkpoint = loaded.checkpoint
        self.device = loaded.device
        self.config: ModelConfig = self.model.config
        if recommended is None:
            recommended = self.checkpoint.generation_config
        overrides = options.override_generation_config or {}
        self.default_sampling = default_sampling(recommended | overrides)
        self.pooler = options.pooler_config or read_pooler_config(self.checkpoint.directory)
        end_ids = self.tokenizer.end_ids if self.tokenizer else ()
        self.eos_ids = tuple(sorted({*self.config.eos_ids, *end_ids}))
        speculative = settle_speculation(options, self.checkpoint, self.device.type)
        options = replace(options, speculative_config=speculative)
        facts = ModelFacts.of(self.model, loaded.drafter)
        device_facts = DeviceFacts.of(self.device, self.model.ops.capturable)
        if self.ranks is not None:
            device_facts = share_device([device_facts, *self.ranks.receive(DeviceFacts)])
        resolved = resolve(options, facts, device_facts)
        if self.ranks is not None:
            self.ranks.send(resolved)
        self.runner, resolved = build_runner(loaded, options, resolved)
        if self.ranks is not None:
            agree_on_tiers(self.ranks, self.runner)
        self.model_dtype = self.model.dtype
        self.kv_dtype = torch_dtype(resolved.requirements.kv_dtype)
        self.cache = resolved.cache
        self.schedule = resolved.schedule
        self.memory = resolved.memory
        self._engines = EngineFactory(
            runner=self.runner,
            cache=self.cache,
            vocab_size=self.config.vocab_size,
            eos_ids=self.eos_ids,
            seed=options.seed,
            ranks=self.ranks,
        )
        recorder = None if options.record_trace is None else Recorder(options.record_trace)
        self.streams = self._stream_factory()
        # Not a method of this object: a reference cycle would keep the memory of a deleted LLM.
        new_engine = functools.partial(
            self.streams.record,
            functools.partial(self._engines.new_engine, self.schedule, recorder),
        )
        self.loop = RequestLoop(new_engine, self.tokenizer)
        self.reader = PromptReader(self.tokenizer, options.parse_special)
        self.guides = Guides(self.tokenizer, self.config.vocab_size, self.eos_ids)
        self.totals = RequestTotals()
        self.profiler = StepProfiler(options.profiler_config)
        self._num_requests = 0
        self._close: weakref.finalize[..., LLM] | None = None
        if self.runner.tier_store is not None or self.ranks is not None:
            # Blocks that wait to be written are written when the interpreter ends, too.
            self._close = weakref.finalize(self, close_runner, self.runner, self.ranks)

    def _stream_factory(self) -> StreamFactory:
        options = self.options
        about = {
            "model": Path(self.checkpoint.source).name.removesuffix(".gguf"),
            "architecture": self.config.architecture,
            "dtype": str(self.model_dtype).removeprefix("torch."),
            "device": str(self.device),
            "weights": self.weights_summary,
        }
        text = None
        if options.show_text and self.tokenizer is not None:
            text = StreamText(self.tokenizer)
        recorder = None
        if options.record_events is not None:
            recorder = EventRecorder(options.record_events)
        return StreamFactory(about, text, recorder)

    def with_options(self, drafter: Drafter | None = None, **changes: Any) -> LLM:
        """Return another LLM with some options changed. It shares the weights and has its own KV
        cache, so the two may be compared in one process. `drafter` drafts in place of the one that
        speculative_config names."""
        if self.ranks is not None:
            raise InvalidRequest(
                "with_options needs tensor_parallel_size 1: make another LLM with these options",
                "tensor_parallel_size",
            )
        loading = sorted(LOADING_OPTIONS & changes.keys())
        if loading:
            raise InvalidRequest(
                f"{', '.join(loading)} cannot change without loading the model again: make "
                "another LLM",
                loading[0],
            )
        options = replace(self.options, **changes)
        recommended = read_generation_config(options.generation_config)
        llm = LLM.__new__(LLM)
        llm.ranks = None
        loaded = ModelOnDevice(self.model, self.checkpoint, self.device, custom_drafter=drafter)
        if drafter is None:
            loaded = with_drafter(loaded, options)
        llm.tokenizer = load_tokenizer(self.checkpoint, self.config.vocab_size, options)
        llm._build(loaded, options, recommended)
        return llm

    @property
    def weights_summary(self) -> str:
        """The format of the weights in words, such as "4-bit weights (GGUF)"."""
        return summarize_weights(self.model, self.checkpoint)

    @property
    def engine(self) -> Engine:
        """The engine that runs now. An interrupt may replace it."""
        return self.loop.engine

    def new_engine(self, schedule: ScheduleConfig) -> Engine:
        """Return another engine for this model, with an empty cache. Only one engine may run at a
        time."""
        return self._engines.new_engine(schedule)

    def close(self) -> None:
        """Write the prefix cache of an idle engine to disk, as far as it fits into host memory at
        once, and end the threads that write and the other ranks. Without a disk tier and without
        tensor parallelism there is nothing to do."""
        if self._close is None or not self._close.alive:
            return
        try:
            # Steps of requests that were interrupted may still be in flight.
            while not self.engine.idle and not self.engine.scheduler.live:
                self.step()
            if self.engine.idle and self.runner.tier_store is not None:
                plan = self.engine.scheduler.flush()
                self.engine.scheduler.commit(plan, self.engine.runner.launch(plan).wait())
        finally:
            self._close()

    # ---- complete replies ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | list[Prompt] | Any = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        lora_request: None = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, batched, and return the outputs in the order of the prompts.

        `sampling_params` is one set for all prompts, or one for each. `priority` has one number for
        each prompt, and lower numbers come first; it needs scheduling_policy="priority"."""
        refuse_adapters(lora_request)
        refuse_unused(tokenization_kwargs=tokenization_kwargs)
        if prompts is None:
            if prompt_token_ids is None:
                raise InvalidRequest(
                    "give prompts: text, token ids, or a list of either", "prompts"
                )
            prompts = prompt_token_ids
        read_prompts = [self.reader.read(prompt) for prompt in as_list(prompts)]
        return self._run(read_prompts, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once. The other options of the `template` are
        add_generation_prompt, continue_final_message, tools and chat_template_kwargs. The chat
        template decides in which format it reads a message's content."""
        refuse_adapters(lora_request)
        for name in ("mm_processor_kwargs", "tokenization_kwargs"):
            refuse_unused(**{name: template.pop(name, None)})
        template["chat_template"] = chat_template
        is_list = bool(messages) and isinstance(messages[0], list)
        conversations: list[Any] = messages if is_list else [messages]
        read_prompts = [
            self.reader.read_chat(conversation, **template) for conversation in conversations
        ]
        return self._run(read_prompts, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | list[Prompt] | Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely texts after each prompt. `concurrency_limit` has no effect: the
        scheduler decides how many prompts run at once."""
        refuse_adapters(lora_request)
        read_prompts = [self.reader.read(prompt) for prompt in as_list(prompts)]
        outputs = self._run(read_prompts, params.sampling(), use_tqdm)
        return [
            BeamSearchOutput(
                [self._beam(output, beam, params) for beam in output.outputs], output.error
            )
            for output in outputs
        ]

    def _beam(
        self, output: RequestOutput, beam: CompletionOutput, params: BeamSearchParams
    ) -> BeamSearchSequence:
        hides_stop = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        generated = beam.token_ids[:-1] if hides_stop else beam.token_ids
        tokens = output.prompt_token_ids + generated
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return BeamSearchSequence(
            tokens,
            beam.logprobs or [],
            beam.cumulative_logprob or 0.0,
            text,
            beam.finish_reason,
            beam.stop_reason,
        )

    def encode_chat(self, messages: list[Message], **template: Any) -> list[int]:
        """Return the token ids of a conversation. `template` options are those of `chat`."""
        return self.reader.read_chat(messages, **template).token_ids

    # ---- embeddings ------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | list[Prompt] | Any,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | list[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of every prompt (docs/embeddings.md)."""
        refuse_adapters(lora_request)
        refuse_unused(tokenization_kwargs=tokenization_kwargs)
        return [
            EmbeddingRequestOutput(*common_fields(output), outputs=EmbeddingOutput(vector.tolist()))
            for output, vector in self._pool(prompts, self.pooler.pooling, pooling_params, use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | list[Prompt] | Any,
        pooling_params: PoolingParams | list[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return hidden states of every prompt as a tensor: its embedding, or the states of all of
        its tokens if `pooling_task` is "token_embed"."""
        refuse_adapters(lora_request)
        refuse_unused(tokenization_kwargs=tokenization_kwargs)
        if pooling_task not in (None, "embed", "encode", "token_embed"):
            raise InvalidRequest(
                f"pooling_task must be embed or token_embed, got {pooling_task!r:.60}",
                "pooling_task",
            )
        pooling = "all" if pooling_task == "token_embed" else self.pooler.pooling
        return [
            PoolingRequestOutput(
                *common_fields(output), outputs=PoolingOutput(torch.from_numpy(vector.copy()))
            )
            for output, vector in self._pool(prompts, pooling, pooling_params, use_tqdm)
        ]

    def score(
        self,
        data_1: Prompt | list[Prompt] | Any,
        data_2: Prompt | list[Prompt] | Any,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how similar two texts are: the cosine of their embeddings. One text is compared
        with each of a list, or two lists pair by pair."""
        left, right = as_list(data_1), as_list(data_2)
        if len(left) not in (1, len(right)):
            raise InvalidRequest(
                f"{len(left)} texts cannot be compared with {len(right)}: give one text and a list,"
                " or two lists of the same length",
                "data_1",
            )
        refuse_adapters(lora_request)
        embeddings = self._pool([*left, *right], self.pooler.pooling, pooling_params, use_tqdm)
        return [
            ScoringRequestOutput(
                second.request_id,
                first.prompt_token_ids + second.prompt_token_ids,
                second.num_cached_tokens,
                outputs=ScoringOutput(cosine(first_vector, second_vector)),
            )
            for (first, first_vector), (second, second_vector) in zip(
                embeddings[: len(left)] * (len(right) // len(left)),
                embeddings[len(left) :],
                strict=True,
            )
        ]

    def _pool(
        self,
        prompts: Prompt | list[Prompt] | Any,
        pooling: str,
        pooling_params: PoolingParams | list[PoolingParams] | None,
        use_tqdm: bool,
    ) -> list[tuple[RequestOutput, Vector]]:
        """Compute every prompt, and return its embedding or, with pooling "all", its states."""
        read = [self.reader.read(prompt) for prompt in as_list(prompts)]
        shared_params = PoolingParams() if pooling_params is None else pooling_params
        params = shared_params if isinstance(shared_params, list) else [shared_params] * len(read)
        if len(params) != len(read):
            raise InvalidRequest(
                f"{len(params)} pooling_params for {len(read)} prompts: give one for all, or one "
                "each",
                "pooling_params",
            )
        for pooling_param in params:
            pooling_param.check_size(self.config.hidden_size)
        arrival = time.monotonic()
        requests = [self._request(prompt, pooling_sampling(), arrival) for prompt in read]
        for request in requests:
            request.pooling = pooling
            request.offline = len(requests) > 1
        outputs = self._complete(requests, [prompt.text for prompt in read], use_tqdm)
        return [
            (output, pooled_vector(output, pooling, self.pooler, pooling_param))
            for output, pooling_param in zip(outputs, params, strict=True)
        ]

    # ---- streaming -------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt | list[Message], sampling_params: SamplingParams | None = None
    ) -> Stream:
        """Complete one prompt or conversation, and yield the new text after each step. Leaving the
        loop aborts the request. Several streams may be open at once; they are batched."""
        return Stream(self, self.submit(prompt, sampling_params))

    def submit(
        self,
        prompt: Prompt | list[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Collector:
        """Queue one prompt or conversation. Calls of `step` compute it, and the collector's
        `pieces` then have what is new."""
        arrival = time.monotonic()
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            read = self.reader.read_chat(prompt)
        else:
            read = self.reader.read(prompt)  # type: ignore[arg-type]
        params = sampling_params or self.get_default_sampling_params()
        self._check(params)
        if params.ranked:
            name = "use_beam_search" if params.use_beam_search else "best_of"
            raise InvalidRequest(
                f"{name} cannot be streamed, because the best text is known only at the end",
                name,
                "unsupported_parameter",
            )
        request = self._request(read, params, arrival, priority, request_id=request_id)
        collector = self.loop.add(request, read.text)
        collector.pieces = []
        return collector

    # ---- the engine ------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine. Returns the requests that ended in it."""
        ended = self.loop.step()
        for output in ended:
            self.totals.add(output)
        self.profiler.step()
        return ended

    def abort(self, request_id: str) -> None:
        self.loop.abort(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prompt on the device and in host memory. KV on disk stays."""
        self.loop.clear_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms of the engine under vLLM's names."""
        return self.totals.metrics(self.engine)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record a trace of PyTorch's operators until stop_profile writes it."""
        self.profiler.start(profile_prefix)

    def stop_profile(self) -> None:
        self.profiler.stop()

    def warm_up(self) -> None:
        """Compile kernels, capture CUDA graphs and prepare guides now, so that no request has to
        wait for it."""
        preparing = self.guides.prepare()
        self.loop.run_alone(functools.partial(warm_up, kind=self.device.type))
        self.runner.capture()
        preparing.join()

    def compile_kernels(self, part: int = 0, num_parts: int = 1) -> None:
        """Run one part of the steps of warm_up(), without capturing CUDA graphs, so that their
        kernels are compiled into the cache."""
        steps = functools.partial(warm_up, kind=self.device.type, part=part, num_parts=num_parts)
        self.loop.run_alone(steps)
        self.runner.compile_graphs(part, num_parts)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls that give none: the recommendations of
        generation_config.json, and the defaults of SamplingParams for the rest."""
        return SamplingParams(**self.default_sampling)

    def get_tokenizer(self) -> Tokenizer:
        return self.reader.need_tokenizer()

    # ---- requests --------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[ReadPrompt],
        sampling_params: SamplingParams | list[SamplingParams] | None,
        use_tqdm: bool,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Run a list of requests to their end."""
        arrival = time.monotonic()
        params = self._params_of_each(sampling_params, len(prompts))
        priorities = [0] * len(prompts) if priority is None else priority
        if len(priorities) != len(prompts):
            raise InvalidRequest(
                f"{len(priorities)} priorities for {len(prompts)} prompts: give one each",
                "priority",
            )
        requests = [
            self._request(
                prompt,
                params[i],
                arrival,
                priority=priorities[i],
                offline=len(prompts) > 1,  # The caller waits for the whole list.
            )
            for i, prompt in enumerate(prompts)
        ]
        return self._complete(requests, [prompt.text for prompt in prompts], use_tqdm)

    def _complete(
        self, requests: list[Request], texts: list[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Run requests to their end. `texts` are the texts of their prompts."""
        try:
            for request, text in zip(requests, texts, strict=True):
                self.loop.add(request, text)
            outputs = self._finish({request.id for request in requests}, use_tqdm)
        finally:
            # A request that was refused, or an interrupt, must not leave the others behind.
            for request in requests:
                if request.id in self.loop.collectors:
                    self.abort(request.id)
        failed = [output for output in outputs.values() if output.error]
        if failed:
            log.error(
                "%d of %d requests ended with an error: %s",
                len(failed),
                len(outputs),
                failed[0].error,
            )
        return [outputs[request.id] for request in requests]

    def _finish(self, request_ids: set[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until these requests have ended."""
        outputs: dict[str, RequestOutput] = {}
        with ProgressBar(len(request_ids), use_tqdm) as bar, no_garbage_collection():
            while len(outputs) < len(request_ids):
                for output in self.step():
                    if output.request_id in request_ids:
                        outputs[output.request_id] = output
                        bar.update(output)
        return outputs

    def _params_of_each(
        self, sampling_params: SamplingParams | list[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Return the checked parameters of each of `count` prompts."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params_list = list(params) if isinstance(params, (list, tuple)) else [params] * count
        if len(params_list) != count:
            raise InvalidRequest(
                f"{len(params_list)} sampling_params for {count} prompts: give one for all, or one "
                "each"
            )
        for distinct in {id(each): each for each in params_list}.values():
            self._check(distinct)
        return params_list

    def _check(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                "sampling_params",
            )
        params.validate()
        if params.logits_processors:
            self.options.check_logits_processors()
        self.runner.logits_pipeline.validate(params)
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer: drop skip_tokenizer_init or use stop_token_ids",
                "stop",
            )

    def _request(
        self,
        prompt: ReadPrompt,
        params: SamplingParams,
        arrival: float,
        priority: int = 0,
        offline: bool = False,
        request_id: str | None = None,
    ) -> Request:
        """Return a request, by default with the next id. `params` are checked."""
        if priority and ignores_priority(self.schedule.policy):
            raise InvalidRequest(
                'priority has no effect here: make the LLM with scheduling_policy="priority"',
                "priority",
            )
        guide: Guide | None = None
        if params.structured_outputs is not None:
            guide = self.guides.compile(params.structured_outputs)
        if params.thinking_token_budget is not None:
            params = self._with_marks(params, prompt.token_ids)
        guide = self.guides.around_reasoning(params, guide)
        if params.trace_decode_token_ids is not None:
            params.check_vocabulary(self.config.vocab_size)
            guide = ReplayGuide(params.trace_decode_token_ids, self.config.vocab_size)
        if request_id is None:
            request_id = str(self._num_requests)
            self._num_requests += 1
        return Request(
            id=request_id,
            prompt=prompt.token_ids,
            params=params,
            arrival=arrival,
            cache_salt=prompt.cache_salt,
            priority=priority,
            guide=guide,
            offline=offline,
        )

    def _with_marks(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """Return the parameters with the marks of the model's reasoning."""
        tokenizer = self.get_tokenizer()
        style = detect_style(tokenizer.chat_templates.values())
        if style is None:
            raise InvalidRequest(
                "thinking_token_budget needs a model whose chat template has reasoning: leave it "
                "out",
                "thinking_token_budget",
            )
        return replace(params, reasoning=style.marks(opened(tokenizer, style, prompt)))


def close_runner(runner: Runner, ranks: Ranks | None) -> None:
    if runner.tier_store is not None:
        runner.tier_store.close()
    if ranks is not None:
        ranks.close()


def common_fields(output: RequestOutput) -> tuple[str, list[int], int]:
    """Return the fields that the result of pooling takes from an output."""
    return output.request_id, output.prompt_token_ids, output.num_cached_tokens


def refuse_adapters(lora_request: None) -> None:
    if lora_request is not None:
        raise InvalidRequest("adapters are not supported: leave lora_request out", "lora_request")


def refuse_unused(**arguments: Any) -> None:
    """Refuse arguments of vLLM's methods that have no effect here."""
    for name, value in arguments.items():
        if value:
            raise InvalidRequest(f"{name} is not supported: leave it out", name)


class Stream(Iterator[CompletionOutput]):
    """The pieces of one request. Closing the stream, or dropping it, aborts the request."""

    def __init__(self, llm: LLM, collector: Collector):
        self._llm = llm
        self._collector = collector
        assert collector.pieces is not None
        self._pieces = collector.pieces

    def __next__(self) -> CompletionOutput:
        while not self._pieces:
            if self._collector.finished:
                raise StopIteration
            self._llm.step()
        return self._pieces.pop(0)

    def close(self) -> None:
        if not self._collector.finished:
            self._llm.abort(self._collector.request.id)
        self._pieces.clear()

    def __del__(self) -> None:
        """Abort the request in the next step. Python may call this at any time, even in a step."""
        if not self._collector.finished:
            self._llm.loop.dropped.append(self._collector.request.id)


class ProgressBar:
    """A bar over the requests of a call, if tqdm is installed and the call takes a while."""

    def __init__(self, total: int, is_shown: bool):
        self.bar: Any = None
        self.tokens = 0
        if is_shown and total > 1:
            try:
                from tqdm import tqdm  # type: ignore[import-untyped]
            except ImportError:
                return
            self.bar = tqdm(total=total, desc="Generating", unit="request", delay=1.0, leave=False)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, output: RequestOutput) -> None:
        if self.bar is not None:
            self.tokens += sum(len(completion.token_ids) for completion in output.outputs)
            self.bar.set_postfix_str(f"{self.tokens} tokens", refresh=False)
            self.bar.update()
