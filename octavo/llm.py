"""The in-process API: text in, text out, around the engine's loop. Names and shapes are those of vLLM's offline class.

    llm = LLM()                                   the embedded model; or a directory, a .gguf file, a hub name
    llm.generate(["Hello"], SamplingParams())     many prompts, batched
    llm.chat([{"role": "user", "content": "Hi"}])
    for piece in llm.stream("Once upon a time"):  pieces as they come

One thread at a time may call it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from octavo.config import ModelConfig, ScheduleConfig
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.errors import InvalidRequest, ModelError
from octavo.memory import MemoryPlan, activation_bytes, kv_budget, size_pool, weight_bytes
from octavo.model.checkpoint import Checkpoint
from octavo.model.load import load_model
from octavo.ops import select
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.runner.kvstore import KVStore
from octavo.runner.runner import Runner
from octavo.text.chat import encode_chat, select_template
from octavo.text.detokenize import TextStream
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output, Request, SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | list[int] | dict[str, Any]  # text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}

# Options of vLLM's class that ask for nothing this engine would do otherwise; others are refused by name.
HARMLESS = {
    "trust_remote_code", "swap_space", "cpu_offload_gb", "disable_log_stats", "enable_chunked_prefill", "max_seq_len_to_capture",
    "disable_custom_all_reduce", "tokenizer_mode", "disable_async_output_proc", "use_v2_block_manager", "compilation_config",
    "async_scheduling", "hf_token", "generation_config", "max_logprobs", "enforce_eager",
}  # fmt: skip


class LLM:
    def __init__(
        self,
        model: str | Path | dict[str, Any] | None = None,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        seed: int = 0,
        revision: str | None = None,
        load_format: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        tensor_parallel_size: int = 1,
        depth: int | None = None,
        progress: bool = True,
        **options: Any,
    ):
        unknown = sorted(set(options) - HARMLESS)
        if tensor_parallel_size != 1:
            unknown.append("tensor_parallel_size")
        if unknown:
            raise InvalidRequest(f"LLM does not know how to honour: {', '.join(unknown)}. Leave them out", unknown[0])
        if options:
            log.info("options without effect here: %s", ", ".join(sorted(options)))
        if depth is not None and not 1 <= depth <= 3:
            raise InvalidRequest(f"depth (steps in flight) must be 1, 2 or 3, got {depth}", "depth")
        self.device = _pick_device(device)
        on_gpu = self.device.type == "cuda"
        ops = select(self.device.type)
        if dtype == "auto" and not on_gpu:
            dtype = "float32"  # a CPU multiplies 16-bit numbers more slowly, batched several times so (docs/models.md)
        self.model, checkpoint = load_model(
            model, dtype=dtype, device=str(self.device), load_format=load_format, ops=ops, progress=progress, revision=revision, seed=seed
        )
        self.config: ModelConfig = self.model.config
        self.tokenizer = None if skip_tokenizer_init else _load_tokenizer(tokenizer, checkpoint)
        ends = self.tokenizer.end_ids if self.tokenizer else ()
        self.eos_ids = tuple(sorted({*self.config.eos_ids, *ends}))
        self.model_dtype = next(self.model.parameters()).dtype
        name = str(self.model_dtype).removeprefix("torch.")
        budget = max_num_batched_tokens or max(max_num_seqs, 8192 if on_gpu else 2048)
        schedule = ScheduleConfig(max_num_seqs, budget, depth=depth or (2 if on_gpu else 1))
        activations = activation_bytes(self.config, schedule, name)
        kv_bytes = kv_budget(self.device, gpu_memory_utilization, activations)
        cache, max_model_len = size_pool(
            self.config, block_size, name, kv_bytes, max_num_seqs, max_model_len, num_gpu_blocks_override
        )
        self.schedule = replace(schedule, max_model_len=max_model_len)
        self.cache = replace(cache, prefix_caching=enable_prefix_caching)
        self.memory = MemoryPlan(
            weight_bytes(self.model), activations, self.config.kv_bytes_per_token(name), block_size, cache.num_blocks
        )
        kv = KVStore(self.config, self.cache, self.model_dtype, self.device)
        runner = Runner(self.model, kv, max_num_seqs, max_model_len, self.device)
        scheduler = Scheduler(self.cache, self.schedule, self.config.vocab_size, self.eos_ids, seed)
        self.engine = Engine(scheduler, runner)
        self._pending: dict[str, _Pending] = {}
        self._count = 0

    # ---- whole answers -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | list[Prompt] | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, batched. One set of parameters for all, or one each. Order is kept."""
        if prompts is None:
            if prompt_token_ids is None:
                raise InvalidRequest("give prompts: text, token ids, or a list of either", "prompts")
            prompts = prompt_token_ids  # type: ignore[assignment]
        return self._run([self._read(p) for p in _as_list(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once. `template` options: chat_template, add_generation_prompt,
        continue_final_message, tools, chat_template_kwargs."""
        many = messages if messages and isinstance(messages[0], list) else [messages]
        return self._run([(None, self.encode_chat(m, **template)) for m in many], sampling_params, use_tqdm)  # type: ignore[arg-type]

    def encode_chat(
        self,
        messages: list[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The token ids a conversation becomes."""
        tokenizer = self._need_tokenizer()
        return encode_chat(
            tokenizer,
            select_template(tokenizer, chat_template, bool(tools)),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )

    # ---- pieces as they come -----------------------------------------------------------------------

    def stream(self, prompt: Prompt | list[Message], sampling_params: SamplingParams | None = None) -> Iterator[CompletionOutput]:
        """Complete one prompt (or conversation), yielding what is new after each step. Leaving the loop ends the request;
        several streams may be open at once, and are then computed together."""
        arrival = time.monotonic()
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            read: tuple[str | None, list[int]] = None, self.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            read = self._read(prompt)  # type: ignore[arg-type]
        pending = self._submit(read, sampling_params or SamplingParams(), arrival)
        return self._follow(pending)

    def _follow(self, pending: _Pending) -> Iterator[CompletionOutput]:
        try:
            while True:
                while pending.news:
                    yield pending.news.pop(0)
                if pending.finished:
                    return
                self.step()
        finally:
            if not pending.finished:
                self.abort(pending.request.id)

    # ---- the loop ----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One step of the engine. Returns the requests that ended in it."""
        return self._take(self.engine.step())

    def abort(self, request_id: str) -> None:
        self._take(self.engine.abort(request_id))

    def _take(self, outputs: list[Output]) -> list[RequestOutput]:
        ended = []
        for out in outputs:
            pending = self._pending.get(out.request_id)
            if pending is None:
                continue
            if pending.take(out):
                self.engine.stop(out.request_id, out.index)
            if pending.finished:
                del self._pending[out.request_id]
                ended.append(pending.output())
        return ended

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | list[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        arrival = time.monotonic()
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = params if isinstance(params, list) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(each)} sampling_params for {len(prompts)} prompts: give one for all, or one each")
        mine: dict[str, _Pending] = {}
        done: dict[str, RequestOutput] = {}
        try:
            for prompt, p in zip(prompts, each, strict=True):
                pending = self._submit(prompt, p, arrival)
                mine[pending.request.id] = pending
            with _Progress(len(mine), use_tqdm) as bar:
                while len(done) < len(mine):
                    for output in self.step():
                        if output.request_id in mine:
                            done[output.request_id] = output
                            bar.update(output)
        finally:
            for request_id in mine.keys() - done.keys():  # refused half-way, or interrupted: nothing stays behind
                self.abort(request_id)
        return [done[request_id] for request_id in mine]

    def _submit(self, prompt: tuple[str | None, list[int]], params: SamplingParams, arrival: float) -> _Pending:
        text, ids = prompt
        params.validate()
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer: drop skip_tokenizer_init or use stop_token_ids", "stop")
        request = Request(str(self._count), ids, params, arrival)
        self.engine.add(request)
        self._count += 1
        pending = self._pending[request.id] = _Pending(request, text, self.tokenizer)
        return pending

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, ids) of a prompt in any of its forms."""
        if isinstance(prompt, dict):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if given is None:
                raise InvalidRequest('a prompt dictionary needs "prompt" or "prompt_token_ids"', "prompt")
            return self._read(given)
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer().encode(prompt)
        try:
            return None, [t if type(t) is int else t.__index__() for t in prompt]
        except (TypeError, AttributeError):
            raise InvalidRequest(f"a prompt is text or a list of token ids, got {prompt!r:.80}", "prompt") from None

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("text needs a tokenizer: drop skip_tokenizer_init, or pass token ids", "prompt")
        return self.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self._need_tokenizer()


class _Pending:
    """One request on its way: gathers the engine's outputs into text."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None):
        self.request, self.prompt, self.tokenizer = request, prompt, tokenizer
        params = request.params
        self.outputs = [CompletionOutput(i, "", []) for i in range(params.n)]
        if params.logprobs is not None:
            for completion in self.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        text = tokenizer if params.detokenize else None
        self.texts = [TextStream(text, params) for _ in range(params.n)]
        self.metrics = RequestMetrics(request.arrival)
        self.cached = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.error: str | None = None
        self.news: list[CompletionOutput] = []

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.outputs)

    def take(self, out: Output) -> bool:
        """Fold in one output. True: the text met a stop string, and the engine should end the sequence."""
        now = time.monotonic()
        if out.tokens and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        completion, stream = self.outputs[out.index], self.texts[out.index]
        if out.prompt_logprobs is not None:
            self.prompt_logprobs = [None if p is None else self._logprobs(p) for p in out.prompt_logprobs]
        self.cached, self.error = out.cached_tokens, out.error or self.error
        hidden = out.finish_reason == "stop" and not self.request.params.include_stop_str_in_output
        delta, stop = stream.push(out.tokens[:-1] if hidden else out.tokens, finished=out.finish_reason is not None)
        new, reason, stop_reason = out.tokens, out.finish_reason, out.stop_reason
        if stop is not None:
            new = new[: stream.tokens_used - len(completion.token_ids)]
            reason, stop_reason = "stop", stop
        piece = CompletionOutput(out.index, delta, new, finish_reason=reason, stop_reason=stop_reason)
        if out.logprobs is not None and completion.logprobs is not None:
            chosen = out.logprobs[: len(new)]
            piece.logprobs = [self._logprobs(p) for p in chosen]
            piece.cumulative_logprob = sum(p.logprob for p in chosen)
            completion.logprobs += piece.logprobs
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + piece.cumulative_logprob
        completion.token_ids += new
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        if reason is not None:
            completion.text = stream.text
        self.news.append(piece)
        if self.finished:
            self.metrics.finished_time = now
        return stop is not None and out.finish_reason is None

    def _logprobs(self, at: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the likeliest, as vLLM lays it out."""
        found = {at.token: Logprob(at.logprob, at.rank, self._decoded(at.token))}
        for rank, (token, logprob) in enumerate(at.top, 1):
            found.setdefault(token, Logprob(logprob, rank, self._decoded(token)))
        return found

    def _decoded(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request.id,
            self.prompt,
            self.request.prompt,
            self.outputs,
            self.finished,
            self.metrics,
            self.cached,
            self.prompt_logprobs,
            self.error,
        )


class _Progress:
    """A bar over the requests of a call, if the call lasts long enough to want one."""

    def __init__(self, total: int, wanted: bool):
        self.bar: Any = None
        if wanted and total > 1:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar, self.tokens = tqdm(total=total, desc="Generating", unit="request", delay=1.0, leave=False), 0

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


def _load_tokenizer(where: str | Path | None, checkpoint: Checkpoint) -> Tokenizer:
    if where is not None:
        return Tokenizer.from_directory(where)
    if checkpoint.gguf_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.gguf_metadata)
    if checkpoint.directory is not None:
        return Tokenizer.from_directory(checkpoint.directory)
    raise ModelError(f"{checkpoint.source} has no tokenizer: give tokenizer=DIRECTORY, or skip_tokenizer_init=True and token ids")


def _as_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a dictionary and a flat list of ids are one."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    prompts = list(prompts)  # type: ignore[arg-type]
    return [prompts] if prompts and not isinstance(prompts[0], (str, dict, list, tuple)) else prompts  # type: ignore[list-item]


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(f"unknown device {device!r}: use auto, cpu or cuda", "device") from None
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device cuda was asked for, but this machine has no usable NVIDIA GPU: use device='cpu'", "device")
    return picked
