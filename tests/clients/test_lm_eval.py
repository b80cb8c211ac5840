"""lm-evaluation-harness reads the same numbers off the server as transformers computes from the
same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: run `make test-clients`")

import lm_eval
import lm_eval.tasks

from tests.serve.running import NAME, Running, server
from tests.text.builders import SENTENCES, byte_level

pytestmark = pytest.mark.slow

QUESTIONS = [
    {
        "question": "The quick brown fox jumps over",
        "choices": [" the lazy dog", " a fence", "x"],
        "answer": 0,
    },
    {"question": "Numbers: 3.14159,", "choices": [" 1,000,000", " and 0xFF"], "answer": 1},
    {"question": "Größe, naïve", "choices": [" café", " 你好", " there is the thing"], "answer": 0},
]
COMMON = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "tiny_generate": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A directory, and the model and tokenizer that transformers reads from it."""
    import transformers

    folder = tmp_path_factory.mktemp("lm-eval") / "model"
    folder.mkdir()
    config = transformers.LlamaConfig(
        vocab_size=640, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(7)
    weights = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in weights.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    weights.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    return folder, weights, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def serving(
    model: tuple[Path, Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with server(tmp_path_factory.mktemp("serve"), model=str(model[0])) as found:
        yield found


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    texts = [{"text": text} for text in (*SENTENCES[:5], " ".join(SENTENCES[:6]))]
    for name, task in TASKS.items():
        rows = texts if name == "tiny_rolling" else QUESTIONS
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        (folder / f"{name}.yaml").write_text(
            json.dumps({"task": name, **COMMON, **task, "dataset_kwargs": data})
        )
    return folder


@torch.no_grad()
def loglikelihood(weights: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    logits = (
        weights(torch.tensor([context + continuation]), use_cache=False).logits[0].log_softmax(-1)
    )
    at = logits[len(context) - 1 : -1]
    chosen = at[range(len(continuation)), continuation]
    return float(chosen.sum()), bool((at.argmax(-1) == torch.tensor(continuation)).all())


@torch.no_grad()
def greedy(weights: Any, tokenizer: Any, prompt: list[int], n: int) -> str:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(weights(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)).split("\n")[0]


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer_backend": "huggingface"},
        {"tokenizer_backend": "huggingface", "num_concurrent": 4},
        {"tokenizer_backend": "huggingface", "batch_size": 3},
        {"tokenizer_backend": "remote"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_the_numbers_are_those_of_transformers(
    model: tuple[Path, Any, Any], serving: Running, tasks: Path, options: dict[str, Any]
) -> None:
    folder, weights, tokenizer = model
    arguments = {
        "model": NAME,
        "base_url": f"{serving.url}/v1/completions",
        "max_length": 512,
        "max_retries": 1,
        **options,
    }
    if options["tokenizer_backend"] == "huggingface":
        arguments["tokenizer"] = str(folder)
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )["samples"]

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    compared = 0
    for sample in found["tiny_choice"]:
        for (context, continuation), ((value, is_greedy),) in zip(
            sample["arguments"], sample["resps"], strict=True
        ):
            before, whole = encode(context), encode(context + continuation)
            want = loglikelihood(weights, before, whole[len(before) :])
            assert (value, is_greedy) == (pytest.approx(want[0], abs=1e-3), want[1])
            compared += 1
    for sample in found["tiny_rolling"]:
        (text,), (value,) = sample["arguments"][0], sample["resps"][0]
        assert value == pytest.approx(
            loglikelihood(weights, [tokenizer.eos_token_id], encode(text))[0], abs=1e-3
        )
        compared += 1
    for sample in found["tiny_generate"]:
        prompt, said = sample["arguments"][0][0], sample["resps"][0][0]
        assert said == greedy(weights, tokenizer, encode(prompt), 12)
        compared += 1
    assert compared == 8 + 6 + 3
