"""vLLM's module names: `from octavo.sampling_params import SamplingParams` works like in vLLM.

The modules have no files. A finder at the end of Python's list makes one of them when a script
imports it, so that modules of Octavo's own come first. A name is loaded when it is first used.
This file must not import other modules of Octavo, because `import octavo` loads it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

ENGINE_ARGS = "octavo.compat.engine_args"
ENVIRONMENT = "octavo.compat.environment"
HTTP_SERVER = "octavo.compat.http_server"
METRICS = "octavo.llm_metrics"
PARAMS = "octavo.params"
PROMPTS = "octavo.compat.prompts"
PROCESSORS = "octavo.runner.logits_processors"

# vLLM's programs, and the command of Octavo that `python -m PROGRAM` runs in the file.
PROGRAM_FILE = "octavo.cli.vllm_program"
PROGRAMS = {
    "octavo.entrypoints.openai.api_server": "serve",
    "octavo.entrypoints.openai.run_batch": "run-batch",
}

# vLLM's module, and for each of its names the module of Octavo that has it.
MODULES: dict[str, dict[str, str]] = {
    "octavo.sampling_params": {
        "SamplingParams": PARAMS,
        "BeamSearchParams": PARAMS,
        "GuidedDecodingParams": PARAMS,
        "StructuredOutputsParams": PARAMS,
        "RepetitionDetectionParams": PARAMS,
        "RequestOutputKind": PARAMS,
    },
    "octavo.pooling_params": {"PoolingParams": "octavo.pooling"},
    "octavo.inputs": {"TextPrompt": PROMPTS, "TokensPrompt": PROMPTS, "PromptType": PROMPTS},
    "octavo.inputs.data": {"TextPrompt": PROMPTS, "TokensPrompt": PROMPTS},
    "octavo.beam_search": {"BeamSearchOutput": "octavo.outputs"},
    "octavo.logprobs": {"Logprob": "octavo.outputs"},
    "octavo.sequence": {"Logprob": "octavo.outputs", "RequestMetrics": "octavo.outputs"},
    "octavo.engine": {},
    "octavo.engine.arg_utils": {"EngineArgs": ENGINE_ARGS, "AsyncEngineArgs": ENGINE_ARGS},
    "octavo.engine.llm_engine": {"LLMEngine": "octavo.compat.llm_engine"},
    "octavo.engine.async_llm_engine": {"AsyncLLMEngine": "octavo.compat.async_llm:AsyncLLM"},
    "octavo.entrypoints": {},
    "octavo.entrypoints.llm": {"LLM": "octavo.llm"},
    "octavo.entrypoints.openai": {},
    **{program: {} for program in PROGRAMS},
    "octavo.entrypoints.launcher": {"serve_http": HTTP_SERVER},
    "octavo.entrypoints.launchers": {},
    "octavo.entrypoints.launchers.launcher": {"serve_http": HTTP_SERVER},
    "octavo.entrypoints.serve": {},
    "octavo.entrypoints.serve.utils": {},
    "octavo.entrypoints.serve.utils.api_utils": {"with_cancellation": HTTP_SERVER},
    "octavo.entrypoints.utils": {"with_cancellation": HTTP_SERVER},
    "octavo.envs": {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": HTTP_SERVER},
    "octavo.usage": {},
    "octavo.usage.usage_lib": {"UsageContext": HTTP_SERVER},
    "octavo.v1": {},
    "octavo.v1.core": {},
    "octavo.v1.core.kv_cache_utils": {"ExternalBlockHash": PROMPTS},
    "octavo.v1.engine": {},
    "octavo.v1.engine.async_llm": {"AsyncLLM": "octavo.compat.async_llm"},
    "octavo.v1.engine.llm_engine": {"LLMEngine": "octavo.compat.llm_engine"},
    "octavo.v1.metrics": {},
    "octavo.v1.metrics.reader": {
        "Metric": METRICS,
        "Counter": METRICS,
        "Gauge": METRICS,
        "Histogram": f"{METRICS}:HistogramMetric",
        "Vector": METRICS,
    },
    "octavo.v1.sample": {},
    "octavo.v1.sample.logits_processor": {
        "LogitsProcessor": PROCESSORS,
        "AdapterLogitsProcessor": PROCESSORS,
        "RequestLogitsProcessor": PROCESSORS,
        "BatchUpdate": PROCESSORS,
        "MoveDirectionality": PROCESSORS,
    },
    "octavo.v1.sample.logits_processor.builtin": {"process_dict_updates": PROCESSORS},
    "octavo.utils": {
        "FlexibleArgumentParser": ENGINE_ARGS,
        "get_open_port": ENVIRONMENT,
        "random_uuid": ENVIRONMENT,
    },
    "octavo.utils.argparse_utils": {"FlexibleArgumentParser": ENGINE_ARGS},
    "octavo.utils.system_utils": {"set_ulimit": HTTP_SERVER},
    "octavo.utils.network_utils": {"get_open_port": ENVIRONMENT},
    "octavo.utils.torch_utils": {"set_random_seed": ENVIRONMENT},
    "octavo.utils.print_utils": {"print_embeddings": ENVIRONMENT},
    "octavo.distributed": {"cleanup_dist_env_and_memory": ENVIRONMENT},
    "octavo.distributed.parallel_state": {
        "cleanup_dist_env_and_memory": ENVIRONMENT,
        "destroy_model_parallel": ENVIRONMENT,
        "destroy_distributed_environment": ENVIRONMENT,
    },
    "octavo.platforms": {"current_platform": ENVIRONMENT},
    "octavo.logger": {"init_logger": ENVIRONMENT},
    "octavo.version": {"__version__": "octavo"},
}
# vLLM's modules for what Octavo does not do.
MISSING = {
    "octavo.lora": "adapters are not supported: merge the adapter into the model's weights",
    "octavo.multimodal": "Octavo runs text models only",
    "octavo.assets": "Octavo runs text models only",
    "octavo.model_executor": "models and loaders of vLLM are not part of Octavo (docs/models.md)",
    "octavo.benchmarks": "vLLM's benchmarks are not part of Octavo: use octavo bench",
    "octavo.v1.executor": "the engine has no executors: it runs in one process",
    "octavo.distributed.kv_transfer": "Octavo does not move KV between servers",
    "octavo.plugins": "vLLM's plugins are not supported",
}


class VllmModules:
    """Finds and makes the modules above."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MISSING:
            raise ModuleNotFoundError(f"no module {name}: {MISSING[name]}", name=name)
        if name not in MODULES:
            return None
        loader: Any = self
        return ModuleSpec(name, loader, origin="octavo.compat", is_package=name not in PROGRAMS)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def load(name: str) -> Any:
            return load_name(module.__name__, name)

        vars(module).update(__getattr__=load, __all__=list(MODULES[module.__name__]))

    def get_code(self, name: str) -> CodeType | None:
        """Return what `python -m NAME` runs."""
        if name not in PROGRAMS:
            raise ImportError(f"{name} is not a program", name=name)
        from importlib.util import find_spec

        spec: Any = find_spec(PROGRAM_FILE)
        code: CodeType | None = spec.loader.get_code(PROGRAM_FILE)
        return code


def load_name(module: str, name: str) -> Any:
    """Return what a vLLM module has under this name."""
    module_name = MODULES[module].get(name)
    if module_name is None:
        known_names = ", ".join(MODULES[module]) or "no names of its own"
        raise AttributeError(f"module {module!r} has no {name!r}; Octavo's has {known_names}")
    module_name, _, other_name = module_name.partition(":")
    return getattr(importlib.import_module(module_name), other_name or name)


def install() -> None:
    """Let Python find the modules."""
    if not any(isinstance(finder, VllmModules) for finder in sys.meta_path):
        sys.meta_path.append(VllmModules())
