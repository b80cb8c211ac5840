"""Which of vLLM's examples are run, and by which rule each other example is left out.

An example is chosen if it works on text, needs one device and no program beside vLLM, and uses no
adapter and no model that only embeds or classifies. Every .py file below vLLM's examples/ must be
in one of the two tables: `unlisted` returns those that are in neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The reasons why a chosen example does not run.
BENCHMARKS = "imports vLLM's benchmarks, which are not part of Octavo"
CONNECTOR = "imports a KV connector of vLLM"
NO_CALL = "the embedded model answers in words where the script needs a tool call"
MCP = "needs tools that the server itself runs over MCP"


@dataclass(frozen=True)
class Example:
    """How an example is run: its own arguments, and flags of the server for online examples."""

    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    reason: str = ""  # why it does not run, if it does not
    server: str = ""  # an example that is the server of this one, in place of `octavo serve`
    lasts: int = 0  # seconds after which an example that has no end is interrupted


REASONING = ("--reasoning-parser", "deepseek_r1")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
XLAM = ("--enable-auto-tool-choice", "--tool-call-parser", "xlam")

OFFLINE: dict[str, Example] = {
    "basic/offline_inference/basic.py": Example(),
    "basic/offline_inference/chat.py": Example(("--max-tokens", "32")),
    "basic/offline_inference/generate.py": Example(),
    "deployment/async_llm_streaming.py": Example(),
    "deployment/llm_engine_example.py": Example(),
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": Example(),
    "features/automatic_prefix_caching/prefix_caching_offline.py": Example(),
    "features/batch_invariance/reproducibility_offline.py": Example(),
    "features/context_extension/context_extension_offline.py": Example(),
    "features/logits_processor/custom.py": Example(),
    "features/logits_processor/custom_req.py": Example(),
    "features/logits_processor/custom_req_init.py": Example(),
    "features/pause_resume/pause_resume_offline.py": Example(),
    "features/profiling/run_one_batch_offline.py": Example(),
    "features/profiling/simple_profiling_offline.py": Example(),
    "features/reset_kv/reset_kv_offline.py": Example(),
    "features/speculative_decoding/extract_hidden_states_offline.py": Example(reason=CONNECTOR),
    "features/speculative_decoding/mlpspeculator_offline.py": Example(),
    "features/speculative_decoding/spec_decode_offline.py": Example(reason=BENCHMARKS),
    "features/structured_outputs/structured_outputs_offline.py": Example(),
    "generate/trace_replay_offline.py": Example(),
    "observability/metrics/offline.py": Example(),
    "tool_calling/chat_with_tools_offline.py": Example(reason=NO_CALL),
}
ONLINE: dict[str, Example] = {
    "applications/api_server/client.py": Example(server="applications/api_server/server.py"),
    "basic/online_serving/openai_chat_completion_client.py": Example(),
    "basic/online_serving/openai_completion_client.py": Example(),
    "features/kv_events/kv_events_subscriber.py": Example(
        flags=("--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq"}'),
        lasts=20,
    ),
    "features/structured_outputs/structured_outputs_client.py": Example(),
    "generate/batched_chat_completions_online.py": Example(),
    "reasoning/openai_chat_completion_tool_calls_with_reasoning.py": Example(
        flags=(*REASONING, *TOOLS), reason=NO_CALL
    ),
    "reasoning/openai_chat_completion_with_reasoning.py": Example(flags=REASONING),
    "reasoning/openai_chat_completion_with_reasoning_streaming.py": Example(flags=REASONING),
    "reasoning/openai_responses_client.py": Example(flags=("--reasoning-parser", "qwen3")),
    "scale_out/token_generation_client.py": Example(),
    "tool_calling/openai_chat_completion_client_with_tools.py": Example(
        flags=TOOLS, reason=NO_CALL
    ),
    "tool_calling/openai_chat_completion_client_with_tools_required.py": Example(
        flags=("--structured-outputs-config.backend", "outlines")
    ),
    "tool_calling/openai_chat_completion_client_with_tools_xlam.py": Example(flags=XLAM),
    "tool_calling/openai_chat_completion_client_with_tools_xlam_streaming.py": Example(flags=XLAM),
    "tool_calling/openai_responses_client_with_mcp_tools.py": Example(reason=MCP),
    "tool_calling/openai_responses_client_with_tools.py": Example(
        flags=(*TOOLS, "--reasoning-parser", "qwen3")
    ),
}

DEVICES = "needs several devices or machines"
INPUT = "its input is not text"
LORA = "uses an adapter"
POOLING = "needs a model that embeds, classifies or rewards"
PROGRAMS = "needs another program or library beside vLLM"
WEIGHTS = "writes or reads weights in a format of vLLM's own, or replaces them"

# A path, or a folder with all its files, and the rule that leaves it out.
LEFT_OUT: dict[str, str] = {
    "__init__.py": "has no code",
    "scale_out/__init__.py": "has no code",
    "applications/api_server/server.py": "is the server of another example",
    "applications/chatbot": PROGRAMS,
    "applications/rag": PROGRAMS,
    "basic/offline_inference/classify.py": POOLING,
    "basic/offline_inference/embed.py": POOLING,
    "basic/offline_inference/score.py": POOLING,
    "disaggregated": DEVICES,
    "features/data_parallel": DEVICES,
    "features/lora": LORA,
    "features/pause_resume/data_parallel_pause_resume.py": DEVICES,
    "features/prompt_embed": INPUT,
    "features/sharded_state": WEIGHTS,
    "features/tensorize_vllm_model.py": WEIGHTS,
    "features/torchrun": DEVICES,
    "generate/multimodal": INPUT,
    "generate/qwen_1m_offline.py": DEVICES,
    "observability/opentelemetry": PROGRAMS,
    "pooling": POOLING,
    "ray_serving": PROGRAMS,
    "rl": WEIGHTS,
    "scale_out/example_mm_serve.py": INPUT,
    "speech_to_text": INPUT,
}


def unlisted(examples: Path) -> list[str]:
    """Return the examples that no table names, such as new ones."""
    found = sorted(str(path.relative_to(examples)) for path in examples.rglob("*.py"))
    return [name for name in found if not (name in OFFLINE or name in ONLINE or rule_of(name))]


def rule_of(name: str) -> str:
    """Return the rule that leaves an example out, or no text."""
    for path, rule in LEFT_OUT.items():
        if name == path or name.startswith(f"{path}/"):
            return rule
    return ""
