"""Embeddings: hidden states equal those of transformers, whatever the engine does inside."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, PoolingParams, SamplingParams
from octavo.config import PoolerConfig
from octavo.errors import InvalidRequest, ModelError
from octavo.pooler_config import read_pooler_config
from tests import tiny


def make(architecture: str = "llama", **options: Any) -> LLM:
    defaults = dict(max_model_len=200, max_num_seqs=8, progress=False, num_gpu_blocks_override=100)
    return LLM(tiny.model_dir(architecture), **(defaults | options))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def prompts(count: int) -> list[list[int]]:
    g = random.Random(1)
    shared = [g.randrange(250) for _ in range(40)]
    return [shared[: g.randrange(40)] + [g.randrange(250) for _ in range(20)] for _ in range(count)]


@torch.no_grad()
def hf_states(architecture: str, ids: list[int]) -> torch.Tensor:
    """The hidden states after the last norm, [tokens, hidden]."""
    model = tiny.hf_model(architecture)
    output = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return output.hidden_states[-1][0]


@pytest.mark.parity
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_hidden_states_equal_those_of_transformers(architecture: str) -> None:
    many = prompts(4)
    for options in (
        dict(),
        dict(max_num_batched_tokens=8, depth=2),
        dict(num_gpu_blocks_override=6, depth=2, max_num_batched_tokens=16),
    ):
        llm = make(architecture, block_size=16, **options)
        for _ in range(2):  # The second time, prompts are in the prefix cache.
            last = llm.encode(many, PoolingParams(use_activation=False), use_tqdm=False)
            whole = llm.encode(
                many, PoolingParams(use_activation=False), pooling_task="token_embed"
            )
            for prompt, last_state, all_states in zip(many, last, whole, strict=True):
                want = hf_states(architecture, prompt)
                torch.testing.assert_close(last_state.outputs.data, want[-1], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(all_states.outputs.data, want, rtol=1e-4, atol=1e-4)
        assert any(output.num_cached_tokens for output in last)
        assert not any(output.num_cached_tokens for output in whole)
        llm.engine.scheduler.check()


def test_the_mean_is_that_of_all_tokens() -> None:
    llm = make(pooler_config={"pooling_type": "MEAN"}, max_num_batched_tokens=8)
    (prompt,) = prompts(1)
    want = hf_states("llama", prompt).mean(0)
    for _ in range(2):
        (output,) = llm.embed([prompt], use_tqdm=False)
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), want / want.norm(), rtol=1e-4, atol=1e-4
        )


def test_text_and_embeddings_share_a_batch_and_the_prefix_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = list(range(100, 164))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
    (output,) = llm.embed([prompt], use_tqdm=False)
    assert output.num_cached_tokens == 48  # of four blocks, the last one is computed
    stream = llm.stream(prompt, greedy)
    next(stream)
    (again,) = llm.embed([prompt], use_tqdm=False)  # while the stream decodes
    assert again.outputs.embedding == pytest.approx(output.outputs.embedding, abs=1e-6)
    assert [token for piece in stream for token in piece.token_ids] == alone[-5:]


def test_dimensions_and_length(llm: LLM) -> None:
    text = "hello world"
    (plain,) = llm.embed(text, pooling_params=PoolingParams(normalize=False))
    (short,) = llm.embed(text, pooling_params=PoolingParams(dimensions=8))
    values = np.array(plain.outputs.embedding[:8])
    assert short.outputs.hidden_size == 8 and plain.outputs.hidden_size == 32
    assert short.outputs.embedding == pytest.approx((values / np.linalg.norm(values)).tolist())
    one, two = llm.embed([text, text], pooling_params=[PoolingParams(4), PoolingParams(5)])
    assert (one.outputs.hidden_size, two.outputs.hidden_size) == (4, 5)


def test_a_score_is_the_cosine_of_two_embeddings(llm: LLM) -> None:
    texts = ["one", "two", "three"]
    vectors = [np.array(output.outputs.embedding) for output in llm.embed(texts)]
    scores = [output.outputs.score for output in llm.score(texts[0], texts)]
    assert scores == pytest.approx([float(vectors[0] @ vector) for vector in vectors])
    pairs = [output.outputs.score for output in llm.score(texts, list(reversed(texts)))]
    assert pairs[1] == pytest.approx(1.0) and pairs[0] == pytest.approx(pairs[2])


def test_a_prompt_may_fill_the_whole_context(llm: LLM) -> None:
    assert len(llm.embed([[5] * 200])[0].prompt_token_ids) == 200
    with pytest.raises(InvalidRequest, match="201 tokens, but the context holds 200: shorten"):
        llm.embed([[5] * 201])


def test_damaged_weights_end_in_an_error_and_nothing_else() -> None:
    llm = make()
    llm.model.norm.data.fill_(float("nan"))  # type: ignore[union-attr, operator]
    with pytest.raises(Exception, match="no finite logit"):
        llm.embed([[1, 2, 3]])
    assert llm.engine.idle
    llm.engine.scheduler.check()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda llm: llm.embed("x", pooling_params=PoolingParams(dimensions=33)), "at most 32"),
        (lambda llm: llm.embed(["x", "y"], pooling_params=[PoolingParams()]), "1 pooling_params"),
        (lambda llm: llm.encode("x", pooling_task="classify"), "embed or token_embed"),
        (lambda llm: llm.score(["a", "b"], ["c"]), "2 texts cannot be compared with 1"),
        (lambda llm: PoolingParams(dimensions=0), "dimensions must be"),
        (lambda llm: PoolingParams(normalize="yes"), "normalize must be true or false"),
        (lambda llm: LLM(pooler_config={"pooling_type": "CLS"}), "LAST or MEAN"),
        (lambda llm: LLM(pooler_config=["x"]), "pooler_config must be a dictionary"),
    ],
)
def test_refused(llm: LLM, attempt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        attempt(llm)


# ---- files of the model -----------------------------------------------------------------------


def sentence_files(folder: Path, modules: list[str], **modes: bool) -> Path:
    entries = [{"type": f"sentence_transformers.models.{one}", "path": one} for one in modules]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps({"dimension": 32, **modes}))
    return folder


def test_the_files_of_sentence_transformers_say_how_to_pool(tmp_path: Path) -> None:
    modes = dict(pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False)
    folder = sentence_files(tmp_path, ["Transformer", "Pooling"], **modes)
    assert read_pooler_config(folder) == PoolerConfig("MEAN", use_activation=False)
    assert read_pooler_config(None) == read_pooler_config(tmp_path / "other") == PoolerConfig()


@pytest.mark.parametrize(
    ("modules", "modes", "message"),
    [
        (["Transformer", "Dense"], {}, "does not compute: Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        (["Transformer", "Pooling"], {}, "pools with nothing"),
    ],
)
def test_other_ways_to_pool_are_refused(
    tmp_path: Path, modules: list[str], modes: dict[str, bool], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_pooler_config(sentence_files(tmp_path, modules, **modes))


def test_a_checkpoint_of_an_embedding_model_has_no_prefix(tmp_path: Path) -> None:
    """transformers saves the model without its head under names without `model.`."""
    tiny.hf_model("llama").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path, skip_tokenizer_init=True, max_model_len=64, progress=False)
    (output,) = llm.encode([[1, 2, 3]], PoolingParams(use_activation=False))
    want = hf_states("llama", [1, 2, 3])[-1]
    torch.testing.assert_close(output.outputs.data, want, rtol=1e-4, atol=1e-4)
