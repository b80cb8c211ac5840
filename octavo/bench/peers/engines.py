"""One small class for each engine: it loads a model, and continues prompts greedily.

    engine.generate(prompts, count)   prompts of token ids -> `count` new token ids for each

The prompts of one call have equal lengths. A new engine is one class with `version`, `weights` and
`generate`, and one line in ENGINES. This file is imported by peer_worker.py, without Octavo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
CONTEXT = 4096  # tokens of all sequences of a call


class OctavoEngine:
    """Octavo without prefix cache and without drafts, as the others: each token is computed."""

    weights = "4-bit"
    drafts = "off"

    def __init__(self, models: Path, threads: int):
        import torch

        from octavo import LLM, SamplingParams, __version__

        torch.set_num_threads(threads)
        self.version = __version__
        self.new_params = SamplingParams
        self.llm = LLM(
            max_num_seqs=16,
            max_model_len=2048,
            enable_prefix_caching=False,
            speculative_config=self.drafts,
            progress=False,
        )
        self.llm.warm_up()

    def generate(self, prompts: Prompts, count: int) -> Prompts:
        params = self.new_params(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


class OctavoDraftingEngine(OctavoEngine):
    """Octavo with its default drafts, which give the same tokens."""

    drafts = "auto"


class TransformersEngine:
    weights = "float32"

    def __init__(self, models: Path, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.version = transformers.__version__
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            models / "hf", dtype=torch.float32
        ).eval()

    def generate(self, prompts: Prompts, count: int) -> Prompts:
        ids = self.torch.tensor(prompts)
        output = self.model.generate(
            ids,
            attention_mask=self.torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return [reply.tolist() for reply in output[:, ids.shape[1] :]]


class LlamaCppEngine:
    """llama.cpp through its C interface: one batch holds the next token of every sequence."""

    file = "q4_0.gguf"
    weights = "Q4_0"

    def __init__(self, models: Path, threads: int):
        import llama_cpp
        import numpy

        self.api = llama_cpp
        self.numpy = numpy
        self.version = llama_cpp.__version__
        self.ignore_log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.ignore_log, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        path = str(models / self.file).encode()
        model = llama_cpp.llama_model_load_from_file(path, model_params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_seq_max = 16
        params.n_threads = threads
        params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def generate(self, prompts: Prompts, count: int) -> Prompts:
        api = self.api
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        replies: Prompts = [[] for _ in prompts]
        for step in range(count):
            self._decode(entries)
            sampled = [index for index, entry in enumerate(entries) if entry[3]]
            for reply, index in zip(replies, sampled, strict=True):
                reply.append(self._best_token(index))
            entries = [
                (reply[-1], len(prompt) + step, sequence, True)
                for sequence, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
            ]
        return replies

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        for index, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wants_logits
        batch.n_tokens = len(entries)
        status = self.api.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best_token(self, index: int) -> int:
        pointer = self.api.llama_get_logits_ith(self.context, index)
        logits = self.numpy.ctypeslib.as_array(pointer, shape=(self.vocab_size,))
        return int(logits.argmax())


class LlamaCppStoredEngine(LlamaCppEngine):
    """llama.cpp with the embedded model's own file."""

    file = "q4_1.gguf"
    weights = "Q4_1"


class OnnxRuntimeEngine:
    weights = "int4"

    def __init__(self, models: Path, threads: int):
        import numpy
        import onnxruntime_genai

        self.api = onnxruntime_genai
        self.numpy = numpy
        self.version = onnxruntime_genai.__version__
        config = onnxruntime_genai.Config(str(models / "ort-int4"))
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(overlay_text(session))
        self.model = onnxruntime_genai.Model(config)

    def generate(self, prompts: Prompts, count: int) -> Prompts:
        length = len(prompts[0]) + count
        params = self.api.GeneratorParams(self.model)
        params.set_search_options(
            max_length=length, min_length=length, do_sample=False, batch_size=len(prompts)
        )
        generator = self.api.Generator(self.model, params)
        generator.append_tokens(self.numpy.array(prompts, dtype=self.numpy.int32))
        generated = 0
        while generated < count and not generator.is_done():
            generator.generate_next_token()
            generated += 1
        start = len(prompts[0])
        return [
            [int(token) for token in generator.get_sequence(index)[start:]]
            for index in range(len(prompts))
        ]


def overlay_text(session: dict[str, int]) -> str:
    import json

    return json.dumps({"model": {"decoder": {"session_options": session}}})


class OpenVinoEngine:
    """OpenVINO GenAI with continuous batching, from a GGUF file of 16-bit numbers."""

    file = "f16.gguf"
    weights = "float16"

    def __init__(self, models: Path, threads: int):
        import numpy
        import openvino
        import openvino_genai

        self.api = openvino_genai
        self.new_tensor = openvino.Tensor
        self.numpy = numpy
        self.version = openvino_genai.__version__.partition("-")[0]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 16
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(models / self.file), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )

    def generate(self, prompts: Prompts, count: int) -> Prompts:
        config = self.api.GenerationConfig()
        config.max_new_tokens = count
        config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        inputs = [
            self.new_tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
            for prompt in prompts
        ]
        found = self.pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in found]


class OpenVinoQuantisedEngine(OpenVinoEngine):
    file = "q8_0.gguf"
    weights = "Q8_0"


class VllmEngine:
    weights = "bfloat16"

    def __init__(self, models: Path, threads: int):
        import os

        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self.version = vllm.__version__
        self.new_params = vllm.SamplingParams
        self.llm = vllm.LLM(
            str(models / "hf"),
            max_model_len=2048,
            max_num_seqs=16,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, count: int) -> Prompts:
        params = self.new_params(
            temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


ENGINES: dict[str, Callable[[Path, int], Any]] = {
    "octavo": OctavoEngine,
    "octavo-drafts": OctavoDraftingEngine,
    "transformers": TransformersEngine,
    "llama.cpp": LlamaCppEngine,
    "llama.cpp-q4_1": LlamaCppStoredEngine,
    "onnxruntime-genai": OnnxRuntimeEngine,
    "openvino": OpenVinoEngine,
    "openvino-q8_0": OpenVinoQuantisedEngine,
    "vllm": VllmEngine,
}
# The package that must be importable for an engine.
PACKAGES = {
    "octavo": "octavo",
    "octavo-drafts": "octavo",
    "transformers": "transformers",
    "llama.cpp": "llama_cpp",
    "llama.cpp-q4_1": "llama_cpp",
    "onnxruntime-genai": "onnxruntime_genai",
    "openvino": "openvino_genai",
    "openvino-q8_0": "openvino_genai",
    "vllm": "vllm",
}
