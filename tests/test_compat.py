"""vLLM's classes and module names: what a script finds after its import is changed."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import octavo
from octavo import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, SamplingParams
from octavo.compat.async_llm import AsyncLLM
from octavo.compat.engine_args import FlexibleArgumentParser
from octavo.compat.vllm_modules import MISSING, MODULES, PROGRAMS
from octavo.config import VllmConfig
from octavo.errors import InvalidRequest
from octavo.llm import MISSING_METHODS
from octavo.llm_metrics import Counter, Gauge, HistogramMetric, Vector
from octavo.params import GuidedDecodingParams, RequestOutputKind
from octavo.runner.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)
from tests import tiny

MESSAGES = [{"role": "user", "content": "Say hello."}]


def options(**changes: Any) -> dict[str, Any]:
    return {"model": tiny.model_dir(), "max_model_len": 200, "max_num_seqs": 4, **changes}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(progress=False, **options())


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **more)


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_a_module_exists(module: str) -> None:
    imported = importlib.import_module(module)
    for name in MODULES[module]:
        assert getattr(imported, name) is not None
    with pytest.raises(ImportError, match="Nothing"):
        exec(f"from {module} import Nothing")


def test_the_package_has_the_names_that_it_lists() -> None:
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)


def test_a_module_that_is_not_supported_says_why() -> None:
    for module, reason in MISSING.items():
        with pytest.raises(ModuleNotFoundError, match=reason.partition(":")[0][:40]):
            importlib.import_module(module)


@pytest.mark.parametrize(("program", "command"), PROGRAMS.items())
def test_programs_of_vllm_run_commands_of_octavo(program: str, command: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", program, "--no-such-option"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert f"octavo {command}" in process.stderr and "No such option" in process.stderr


def test_methods_that_are_not_supported_are_refused_by_name(llm: LLM) -> None:
    for name in MISSING_METHODS:
        with pytest.raises(AttributeError, match=f"LLM has no {name}: "):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        llm.other  # noqa: B018


# ---- LLM -----------------------------------------------------------------------------------------


def test_chat_takes_the_arguments_of_vllm(llm: LLM) -> None:
    plain = llm.chat(MESSAGES, greedy(), use_tqdm=False)
    same = llm.chat(
        MESSAGES,
        greedy(),
        use_tqdm=False,
        lora_request=None,
        chat_template=None,
        chat_template_content_format="auto",
        add_generation_prompt=True,
        mm_processor_kwargs=None,
    )
    assert same[0].prompt_token_ids == plain[0].prompt_token_ids
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs is not supported"):
        llm.chat(MESSAGES, mm_processor_kwargs={"num_crops": 4})


def test_sampling_params_take_the_fields_of_vllm() -> None:
    params = SamplingParams.from_optional(
        temperature=np.float32(0.5),
        max_tokens=np.int64(7),
        top_p=None,
        bad_words=[],
        skip_clone=True,
        guided_decoding=GuidedDecodingParams(choice=["yes", "no"], backend="auto"),
    )
    assert (params.max_tokens, params.top_p) == (7, 1.0)
    assert params.structured_outputs is not None and params.structured_outputs.kind == "choice"
    assert params.clone() == params
    with pytest.raises(InvalidRequest, match="bad_words is not supported: .*logit_bias"):
        SamplingParams(bad_words=["no"])  # type: ignore[call-arg]


def test_hf_overrides_replace_fields_of_the_config() -> None:
    changed = LLM(
        progress=False, **options(hf_overrides={"max_position_embeddings": 96}, max_model_len=96)
    )
    assert changed.config.max_position == 96


def test_metrics_count_what_was_generated(llm: LLM) -> None:
    before = {m.name: m for m in llm.get_metrics()}["vllm:generation_tokens"]
    llm.generate([[1, 2, 3], [4, 5]], greedy(), use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    after = metrics["vllm:generation_tokens"]
    assert isinstance(before, Counter) and isinstance(after, Counter)
    assert after.value - before.value == 12
    latency = metrics["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, HistogramMetric) and latency.count == latency.buckets["+Inf"] >= 2
    assert isinstance(metrics["vllm:kv_cache_usage_perc"], Gauge)


def test_metrics_of_speculative_decoding_count_drafts() -> None:
    drafting = LLM(progress=False, **options(speculative_config="ngram,k=2,adaptive=no"))
    drafting.generate([[7, 8, 9] * 8], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    metrics = {metric.name: metric for metric in drafting.get_metrics()}
    drafted = metrics["vllm:spec_decode_num_draft_tokens"]
    accepted_per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert (
        isinstance(drafted, Counter)
        and isinstance(accepted_per_position, Vector)
        and len(accepted_per_position.values) == 2
    )


def test_a_profile_is_written_to_the_directory(tmp_path: Path) -> None:
    profiled = LLM(progress=False, **options(profiler_config={"torch_profiler_dir": str(tmp_path)}))
    profiled.start_profile("run")
    profiled.generate([[1, 2, 3]], greedy(), use_tqdm=False)
    profiled.stop_profile()
    (trace,) = tmp_path.glob("run*.json")
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_profile_needs_a_directory(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="profiler_config"):
        llm.start_profile()


# ---- logits --------------------------------------------------------------------------------------


class OnlyTarget(LogitsProcessor):
    """Allows only the token that extra_args names."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        assert vllm_config.scheduler_config.max_num_seqs == 4
        self.targets: dict[int, int] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("target", 0), int):
            raise ValueError("target must be a token")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets,
            batch_update,
            lambda params, prompt, output: (params.extra_args or {}).get("target"),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.targets.items():
            kept = logits[row, token].clone()
            logits[row] = -torch.inf
            logits[row, token] = kept
        return logits


class CountUp(AdapterLogitsProcessor):
    """Makes the n-th token of every sequence the token n."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return count_up


def count_up(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[len(output)] = 1e4
    return logits


def test_logits_processors_of_the_engine_change_the_requests_that_ask(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy())]
    changed = LLM(progress=False, **options(logits_processors=[OnlyTarget]))
    params = [greedy(extra_args={"target": 7}), greedy(), greedy(extra_args={"target": 9})]
    outputs = changed.generate(prompts, params, use_tqdm=False)
    replies = [output.outputs[0].token_ids for output in outputs]
    assert replies == [[7] * 6, plain[1], [9] * 6]
    again = changed.generate(prompts, greedy(), use_tqdm=False)  # The slots are used again.
    assert [output.outputs[0].token_ids for output in again] == plain
    with pytest.raises(InvalidRequest, match="target must be a token"):
        changed.generate(prompts, greedy(extra_args={"target": "x"}))


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_processors_see_the_tokens_so_far(depth: int) -> None:
    name = f"{__name__}:CountUp"
    counting = LLM(progress=False, **options(logits_processors=[name], depth=depth))
    (output,) = counting.generate([[50, 60]], greedy(), use_tqdm=False)
    assert output.outputs[0].token_ids == [0, 1, 2, 3, 4, 5]


def test_a_request_has_logits_processors_of_its_own(llm: LLM) -> None:
    def last_of_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[prompt[-1]] = 1e4
        return logits

    params = [greedy(logits_processors=[count_up]), greedy(logits_processors=[last_of_prompt])]
    outputs = llm.generate([[50, 60], [50, 60]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [[0, 1, 2, 3, 4, 5], [60] * 6]


def test_logits_processors_that_cannot_work_are_refused() -> None:
    for given in (["no.such:Class"], [dict]):
        with pytest.raises(
            InvalidRequest, match="logits_processors .* cannot be loaded|LogitsProcessor"
        ):
            LLM(progress=False, **options(logits_processors=given))
    with pytest.raises(InvalidRequest, match="do not work with speculative_config"):
        LLM(**options(logits_processors=[CountUp], speculative_config="ngram"))


def test_a_known_reply_is_replayed_with_its_logprobs(llm: LLM) -> None:
    whole = llm.generate([[1, 2, 3]], greedy(logprobs=1), use_tqdm=False)[0].outputs[0]
    tokens = [*whole.token_ids[:3], 256, 5]  # 256 is the end of text.
    params = SamplingParams(trace_decode_token_ids=tokens, logprobs=1)
    replayed = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0]
    assert replayed.token_ids == tokens
    assert whole.logprobs is not None and replayed.logprobs is not None
    first = tokens[0]
    expected = whole.logprobs[0][first].logprob
    assert replayed.logprobs[0][first].logprob == pytest.approx(expected, abs=1e-4)
    with pytest.raises(InvalidRequest, match="trace_decode_token_ids"):
        llm.generate([[1]], SamplingParams(trace_decode_token_ids=[10**6]))


# ---- EngineArgs ----------------------------------------------------------------------------------


def test_engine_args_are_read_from_a_command_line() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=tiny.model_dir())
    words = ["--max_model_len", "128", "--no-enable-prefix-caching", "--max-num-seqs=2"]
    words += ["--hf-overrides", '{"max_position_embeddings": 128}', "--tensor-parallel-size", "1"]
    args = EngineArgs.from_cli_args(parser.parse_args(words))
    assert (args.max_model_len, args.enable_prefix_caching, args.max_num_seqs) == (128, False, 2)
    assert args.enable_lora is False
    made = LLM(**vars(parser.parse_args(words)), progress=False)
    assert made.schedule.max_model_len == 128 and made.schedule.max_num_seqs == 2


# ---- LLMEngine and AsyncLLM ----------------------------------------------------------------------


def test_the_engine_returns_the_reply_so_far_after_each_step(llm: LLM) -> None:
    whole = llm.generate([[1, 2, 3]], greedy(), use_tqdm=False)[0].outputs[0]
    engine = LLMEngine(llm)
    engine.add_request("a", [1, 2, 3], greedy())
    engine.add_request("b", [1, 2, 3], greedy(output_kind=RequestOutputKind.FINAL_ONLY))
    lengths = []
    ended = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "a":
                lengths.append(len(output.outputs[0].token_ids))
            if output.finished:
                ended[output.request_id] = output.outputs[0]
    assert lengths == [1, 2, 3, 4, 5, 6]
    assert ended["a"].text == ended["b"].text == whole.text
    assert engine.get_num_unfinished_requests() == 0


def test_an_aborted_request_of_the_engine_ends(llm: LLM) -> None:
    engine = LLMEngine(llm)
    engine.add_request("a", [1, 2, 3], greedy())
    engine.step()
    engine.abort_request(["a", "unknown"])
    assert not engine.has_unfinished_requests()
    assert not llm.engine.scheduler.live


async def collect(engine: AsyncLLM, request_id: str, kind: RequestOutputKind) -> list[list[int]]:
    params = greedy(output_kind=kind)
    return [
        list(output.outputs[0].token_ids)
        async for output in engine.generate([1, 2, 3], params, request_id)
    ]


def test_asynchronous_replies_are_computed_together() -> None:
    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options()))
        delta, whole = await asyncio.gather(
            collect(engine, "a", RequestOutputKind.DELTA),
            collect(engine, "b", RequestOutputKind.CUMULATIVE),
        )
        assert [token for piece in delta for token in piece] == whole[-1]
        assert [len(tokens) for tokens in whole] == [1, 2, 3, 4, 5, 6]
        with pytest.raises(InvalidRequest, match="token id"):
            async for _ in engine.generate([10**6], greedy(), "c"):
                pass
        await engine.pause_generation(mode="keep")
        paused = asyncio.create_task(collect(engine, "d", RequestOutputKind.FINAL_ONLY))
        await asyncio.sleep(0.05)
        assert not paused.done() and await engine.is_paused()
        await engine.resume_generation()
        assert (await paused)[-1] == whole[-1]
        engine.shutdown()

    asyncio.run(main())


def test_leaving_an_asynchronous_reply_aborts_it(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncLLM(llm)
        replies = engine.generate([1, 2, 3], greedy(), "a")
        await anext(replies)
        await replies.aclose()
        assert not llm.engine.scheduler.live
        engine.shutdown()

    asyncio.run(main())


# ---- a script with an HTTP server of its own -----------------------------------------------------


class FakeRequest:
    """A request whose client disconnects when the event is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def test_a_handler_is_cancelled_when_its_client_disconnects() -> None:
    from octavo.entrypoints.serve.utils.api_utils import with_cancellation

    ended: list[str] = []

    @with_cancellation
    async def handle(body: str, raw_request: FakeRequest) -> str:
        try:
            if body == "long":
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return body

    async def run() -> None:
        assert await handle("short", FakeRequest()) == "short"
        request = FakeRequest()
        reply = asyncio.create_task(handle("long", raw_request=request))
        await asyncio.sleep(0.01)
        request.gone.set()
        assert await reply is None
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == ["cancelled"]


def test_an_application_of_the_script_is_served() -> None:
    import socket

    from octavo.entrypoints.launchers.launcher import serve_http

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    async def run() -> bytes:
        with pytest.raises(InvalidRequest, match="certificates are read once"):
            await serve_http(app, enable_ssl_refresh=True)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = listening.getsockname()
            serving = asyncio.create_task(
                serve_http(app, sock=listening, host=None, lifespan="off", log_level="error")
            )
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            reply = await asyncio.wait_for(reader.readline(), 20)
            serving.cancel()
            await asyncio.wait({serving}, timeout=20)
            return reply

    assert b"204" in asyncio.run(run())


def test_a_chat_template_is_given_as_a_file_or_as_text(tmp_path: Path) -> None:
    import typer

    from octavo.cli.options import read_template

    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    assert read_template(str(file)) == read_template(template) == template
    with pytest.raises(typer.BadParameter, match="is not a chat template"):
        read_template("{% for m in messages %}")
    with pytest.raises(typer.BadParameter, match="cannot read"):
        read_template(str(tmp_path / "missing.jinja"))
