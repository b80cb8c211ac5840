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
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, Unpack

from octavo.assemble import (
    DeviceFacts,
    ModelFacts,
    ModelSource,
    Progress,
    build_engine,
    build_runner,
    load,
    resolve,
    torch_dtype,
)
from octavo.collect import Collector
from octavo.config import ModelConfig, ScheduleConfig
from octavo.core.bounded_kv import max_kv_positions
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.core.trace import Recorder
from octavo.engine_options import EngineKeywords, EngineOptions, from_keywords
from octavo.errors import InvalidRequest, ModelError, OctavoError
from octavo.model.checkpoint import Checkpoint, read_json
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from octavo.params import BeamSearchParams, SamplingParams, recommended_sampling
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
        model: ModelSource = None,
        *,
        progress: Progress = True,
        **options: Unpack[EngineKeywords],
    ):
        """`options` are the fields of EngineOptions (octavo/engine_options.py). `progress` shows a
        bar while the weights are loaded, or is called with the fraction that is loaded."""
        self._start(model, from_keywords(dict(options)), progress)

    @classmethod
    def from_options(
        cls, model: ModelSource, options: EngineOptions, progress: Progress = True
    ) -> LLM:
        llm = cls.__new__(cls)
        llm._start(model, options, progress)
        return llm

    def _start(self, source: ModelSource, options: EngineOptions, progress: Progress) -> None:
        recommended = _read_generation_config(options.generation_config)
        loaded = load(source, options, progress)
        self.options = options
        self.model = loaded.model
        self.checkpoint = loaded.checkpoint
        self.device = loaded.device
        self.config: ModelConfig = self.model.config
        if recommended is None:
            recommended = self.checkpoint.generation_config
        self.default_sampling = _default_sampling(
            recommended | (options.override_generation_config or {})
        )
        self.tokenizer = None
        if not options.skip_tokenizer_init:
            self.tokenizer = _load_tokenizer(
                options.tokenizer, self.checkpoint, self.config.vocab_size
            )
        ends = self.tokenizer.end_ids if self.tokenizer else ()
        self.eos_ids = tuple(sorted({*self.config.eos_ids, *ends}))
        facts = ModelFacts.of(self.model)
        resolved = resolve(options, facts, DeviceFacts.of(self.device, self.model.ops.name))
        self.runner, resolved = build_runner(loaded, options, resolved)
        self.model_dtype = self.model.dtype
        self.kv_dtype = torch_dtype(resolved.requirements.kv_dtype)
        self.cache = resolved.cache
        self.schedule = resolved.schedule
        self.memory = resolved.memory
        self.engine = self.new_engine(self.schedule)
        self._recorder = None if options.record_trace is None else Recorder(options.record_trace)
        if self._recorder is not None:
            self._recorder.listen_to(self.engine.events)
        self._close: weakref.finalize[[], LLM] | None = None
        if self.runner.tiers is not None:
            # What waits to be written is written at the end of the interpreter, too.
            self._close = weakref.finalize(self, self.runner.tiers.close)
        self.guides = Guides(self.tokenizer, self.config.vocab_size, self.eos_ids)
        self._open: dict[str, Collector] = {}
        self._dropped: list[str] = []  # requests whose stream nobody holds any more
        self._count = 0

    def new_engine(self, schedule: ScheduleConfig) -> Engine:
        """Return an engine for this model with an empty cache. Only one engine may run at a time."""
        scheduler = Scheduler(
            self.cache, schedule, self.config.vocab_size, self.eos_ids, self.options.seed
        )
        return build_engine(self.runner, scheduler)

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
        """Compile kernels and capture graphs now, so that the first requests do not wait for them."""
        positions = min(
            self.schedule.max_model_len, self.memory.kv_tokens, max_kv_positions(self.cache)
        )
        longest = max(1, min(positions - 2, self.schedule.max_num_batched_tokens))
        with self.engine.rehearsal():
            for num_tokens in sorted({min(size, longest) for size in WARM_UP[self.device.type]}):
                params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
                self.generate([[0] * num_tokens], params, use_tqdm=False)
                self.reset_prefix_cache()
        self.runner.capture()

    # ---- the loop ----------------------------------------------------------------------------------

    def _renew(self) -> None:
        """An engine with empty books in place of one whose books may be half-written. What it was working on ends."""
        log.warning(
            "the engine was interrupted where its books may be half-written: it begins anew, with nothing cached"
        )
        before = self.engine.scheduler
        self.engine = self.new_engine(self.schedule)
        if self._recorder is not None:
            self._recorder.listen_to(self.engine.events)
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
            parse = given.get("parse_special", self.options.parse_special)
            return text, self._encode(given["prompt"], parse), salt
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, self.options.parse_special), ""
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
