"""Speculative decoding with real models: the same tokens and logprobs as without it, whatever
drafts and whatever else is asked."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.assemble import settle_speculation
from octavo.config import SpeculativeConfig
from octavo.core.draft_methods import describe, parse_speculative
from octavo.core.speculation import (
    MAX_DRAFTED_STEPS,
    MAX_UNDRAFTED_EXTENDS,
    NO_PASSES,
    CostTable,
    DraftCounters,
    Passes,
    Speculation,
    StepCosts,
)
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest, ModelError, ModelNotFound
from octavo.events import StepLanded
from octavo.model import embedded
from octavo.params import StructuredOutputsParams
from octavo.runner.batch_slots import BatchSlots
from octavo.types import Item, Plan, StepResult
from tests.marks import slow_after
from tests.model.test_draft_head import (
    SHARED,
    random_tensors,
    reference_draft,
    target_hidden,
    write_head,
)
from tests.test_llm import prompts
from tests.tiny import ARCHITECTURES, model_dir

METHODS = [
    "ngram,k=4,adaptive=no",
    "suffix,k=8,min=1,adaptive=no",
    "early_exit,layer=1,k=3,adaptive=no",
    "draft_model,model=ITSELF,k=3,adaptive=no",
    "head,model=HEAD,k=3,adaptive=no",
]
QUICK_METHODS = slow_after(2, [METHODS[0], METHODS[-1], *METHODS[1:-1]])
PARAMS = {
    "greedy": dict(temperature=0.0),
    "temperature": dict(temperature=0.7, seed=3),
    "filters": dict(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=4),
    "penalties": dict(temperature=0.0, repetition_penalty=1.05, frequency_penalty=0.1),
    "bias": dict(temperature=0.5, seed=5, logit_bias={7: 30.0, 9: 30.0}, min_tokens=9),
    "logprobs": dict(temperature=0.0, logprobs=3, prompt_logprobs=1),
    "completions": dict(temperature=1.0, seed=6, n=3),
    "beams": dict(temperature=0.0, n=2, best_of=3, use_beam_search=True),
    "stop": dict(temperature=0.0, stop_token_ids=list(range(40, 80)), ignore_eos=False),
}


def make(method: str | dict[str, Any] | None, architecture: str = "llama", **options: Any) -> LLM:
    """ITSELF in a method stands for the directory of the model, and HEAD for that of a head."""
    settings = dict(max_num_seqs=4, block_size=4, max_model_len=128, num_gpu_blocks_override=120)
    if isinstance(method, str):
        method = method.replace("ITSELF", model_dir(architecture)).replace("HEAD", head_dir())
    return LLM(
        model_dir(architecture), device="cpu", speculative_config=method, **(settings | options)
    )


@cache
def head_dir(captured: bool = False) -> str:
    """A draft head with random weights that fits every tiny model. It reads the final hidden state,
    or the hidden state before the second layer if `captured`."""
    path = Path(mkdtemp(prefix="octavo-head-"))
    tensors = random_tensors(captured=int(captured), owns_head=captured)
    return str(write_head(path, tensors, **({} if captured else SHARED)))


def texts() -> list[list[int]]:
    """Return prompts that repeat themselves, so that n-gram lookup proposes drafts."""
    return [prompt * 2 for prompt in prompts(5)]


def run(llm: LLM, **params: Any) -> list[Any]:
    """Return the tokens, logprobs and finish reason of each completion. The last digits of float32
    sums depend on the number of tokens of a step, so logprobs are rounded."""
    chosen = SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | params)
    outputs = llm.generate(texts(), chosen, use_tqdm=False)
    completions = []
    for output in outputs:
        for completion in output.outputs:
            logprobs = [
                [(token, round(entry.logprob, 3), entry.rank) for token, entry in entries.items()]
                for entries in completion.logprobs or []
            ]
            completions.append((list(completion.token_ids), logprobs, completion.finish_reason))
    return completions


def counters(llm: LLM) -> Any:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    return speculation.counters


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_the_same_tokens(architecture: str) -> None:
    want = run(make(None, architecture), temperature=0.0)
    for method in METHODS:
        llm = make(method, architecture)
        assert run(llm, temperature=0.0) == want, method
        assert counters(llm).drafted > 0, method


@pytest.mark.parametrize("method", QUICK_METHODS)
def test_every_parameter_gives_the_same_tokens(method: str) -> None:
    plain = make(None)
    llm = make(method)
    for name, params in PARAMS.items():
        assert run(llm, **params) == run(plain, **params), name
    assert 0 < counters(llm).accepted < counters(llm).drafted


@pytest.mark.parametrize("method", QUICK_METHODS)
@pytest.mark.parametrize(
    "options",
    [
        dict(depth=3),
        dict(num_gpu_blocks_override=32, swap_space=0.01),
        dict(num_gpu_blocks_override=32, enable_prefix_caching=False),
        dict(kv_canary=True),
        dict(kv_cache_dtype="int8"),
        dict(scheduling_policy="priority"),
        dict(max_num_batched_tokens=5),
    ],
    ids=str,
)
def test_every_option_gives_the_same_tokens(method: str, options: dict[str, Any]) -> None:
    want = run(make(None, **options), temperature=0.7, seed=1)
    assert run(make(method, **options), temperature=0.7, seed=1) == want


# ---- a draft model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    slow_after(
        2,
        [
            dict(),
            dict(num_gpu_blocks_override=32),
            dict(depth=3),
            dict(num_gpu_blocks_override=32, enable_prefix_caching=False),
            dict(max_num_batched_tokens=5),
            dict(max_num_seqs=2),
        ],
    ),
    ids=str,
)
def test_a_model_that_drafts_for_itself_is_always_right(options: dict[str, Any]) -> None:
    """Its KV is complete after chunks of prompts, prefix hits, preemption and ordinary steps."""
    llm = make("draft_model,model=ITSELF,k=3,adaptive=no", **options)
    for _ in range(2):  # the second time, prompts are found in the prefix cache
        run(llm, temperature=0.0)
        run(llm, temperature=0.7, seed=1, n=2)
    assert counters(llm).drafted > 100
    assert counters(llm).accepted > 0.99 * counters(llm).drafted
    preempted = options.get("num_gpu_blocks_override") == 32
    assert (llm.engine.scheduler.counters.preemptions > 0) == preempted


def test_the_drafters_memory_is_counted() -> None:
    plain = make(None).memory
    memory = make("draft_model,model=ITSELF").memory
    assert memory.draft_kv_per_token == memory.kv_per_token
    assert memory.kv == 2 * plain.kv
    assert memory.weights == 2 * plain.weights
    assert memory.block_bytes == plain.block_bytes  # of the tiers, which hold the target's KV


def changed_model(path: Path, file: str, old: str, new: str) -> Path:
    """Copy the tiny model, and replace a text in one of its files."""
    shutil.copytree(model_dir(), path)
    text = (path / file).read_text()
    assert old in text
    (path / file).write_text(text.replace(old, new))
    return path


def test_a_draft_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    config = ("config.json", '"max_position_embeddings": 1024', '"max_position_embeddings": 64')
    path = changed_model(tmp_path / "short", *config)
    with pytest.raises(InvalidRequest, match="lower max_model_len to 64"):
        make(f"draft_model,model={path}")


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = changed_model(
        tmp_path / "small", "config.json", '"vocab_size": 300', '"vocab_size": 299'
    )
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:299].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="has 299 tokens, and the model 300"):
        make(f"draft_model,model={path}")
    path = changed_model(tmp_path / "renamed", "tokenizer.json", '"A":', '"AA":')
    with pytest.raises(InvalidRequest, match="has another tokenizer than the model"):
        make(f"draft_model,model={path}")


# ---- a draft head ------------------------------------------------------------------------------


def record_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Fill a list with the known tokens and the drafts of each sequence that is drafted for."""
    recorded: list[tuple[list[int], list[int]]] = []
    drafter: Any = llm.runner.drafter
    draft = drafter.draft

    def recording(passes: list[Tensor], max_len: int, batch_slots: BatchSlots) -> None:
        draft(passes, max_len, batch_slots)
        num_drafts = Counter(slot for slots in passes for slot in slots.tolist())
        for slot, count in num_drafts.items():
            num_known = int(batch_slots.computed[slot]) + 1
            tokens = batch_slots.tokens[slot, : num_known + count].tolist()
            recorded.append((tokens[:num_known], tokens[num_known:]))

    monkeypatch.setattr(drafter, "draft", recording)
    return recorded


@pytest.mark.parametrize(
    ("captured", "options"),
    [
        (False, dict()),
        (True, dict()),
        (False, dict(depth=3, max_num_batched_tokens=5)),
        (False, dict(num_gpu_blocks_override=32)),
    ],
    ids=str,
)
@torch.inference_mode()
def test_drafts_of_a_head_are_those_of_the_reference(
    captured: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's KV and the hidden states that it continues belong to the accepted tokens."""
    path = head_dir(captured)
    llm = make(f"head,model={path},k=3,adaptive=no", enable_prefix_caching=False, **options)
    recorded = record_drafts(llm, monkeypatch)
    run(llm, temperature=0.0, max_tokens=12)
    drafted = Counter(token for _, drafts in recorded for token in drafts)
    likely = [token for token, _ in drafted.most_common(3)]
    run(llm, temperature=0.0, allowed_token_ids=likely)  # so that some drafts are accepted
    assert counters(llm).accepted_at[1] > 0
    tensors = load_file(Path(path) / "model.safetensors")
    for tokens, drafts in recorded[::2]:
        hidden = target_hidden(llm.model, tokens, captured)
        expected, _ = reference_draft(tensors, llm.model, tokens, hidden, len(drafts))
        assert drafts == expected


def test_a_draft_head_is_found_or_required(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"head,model=DIRECTORY\. octavo train-draft"):
        make("head")
    with pytest.raises(ModelNotFound, match="no such directory"):
        make(f"head,model={tmp_path}/absent")
    with pytest.raises(ModelError, match="hidden_size 64, but the target has 32"):
        make(f"head,model={write_head(tmp_path, random_tensors(), hidden_size=64)}")


def test_the_embedded_model_has_a_head_or_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.model.embedded.DRAFT_HEAD", tmp_path)
    with pytest.raises(ModelNotFound, match=r"no draft head .* octavo train-draft"):
        embedded.draft_head_path()
    (tmp_path / "config.json").touch()
    assert embedded.draft_head_path() == tmp_path


def test_auto_drafts_with_the_head_of_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    embedded_checkpoint: Any = SimpleNamespace(source=f"/somewhere/{embedded.FILE}")
    other_checkpoint: Any = SimpleNamespace(source="/somewhere/model")

    def settled(checkpoint: Any = embedded_checkpoint, kind: str = "cpu", **options: Any) -> Any:
        config = settle_speculation(EngineOptions(**options), checkpoint, kind)
        return None if config is None else describe(config)

    assert settled() == "head,k=6,adaptive=yes,lookup=yes"
    assert settled(other_checkpoint) is None
    assert settled(kind="cuda") is None
    for off in ("off", "none", {"method": "off"}, '{"method": "off"}'):
        assert settled(speculative_config=off) is None
    assert settled(speculative_config="ngram,k=2") == "ngram,k=2,adaptive=yes,min=2,max=5"
    for options in (
        dict(kv_eviction="sinks"),
        dict(tensor_parallel_size=2),
        dict(enforce_eager=True),
        dict(quantization="int8"),
        dict(batching="static"),
        dict(kv_cache=False),
    ):
        assert settled(**options) is None, options
    monkeypatch.setattr("octavo.model.embedded.DRAFT_HEAD", Path("/nowhere"))
    assert settled() is None


def test_auto_gives_the_tokens_of_no_drafts() -> None:
    plain = LLM(speculative_config="off", progress=False, max_num_seqs=4, max_model_len=256)
    drafting = plain.with_options(speculative_config="auto")
    prompts = ["Repeat after me: one two three, one two three, one two", "The capital of France"]
    for params in (dict(temperature=0.0), dict(temperature=0.8, seed=1)):
        sampling = SamplingParams(max_tokens=40, ignore_eos=True, **params)
        want = [output.outputs[0].token_ids for output in plain.generate(prompts, sampling)]
        got = [drafting.generate(prompt, sampling)[0].outputs[0].token_ids for prompt in prompts]
        assert got == want
    assert counters(drafting).accepted > 0


def test_steps_have_a_draft_extend_only_if_drafts_may_pay() -> None:
    config = SpeculativeConfig("device", num_tokens=2)
    sequences = {0: SimpleNamespace(drafter_has_kv=True, token_limit=500, tokens=[0] * 20)}

    def extends(*tokens: int, start: int | None = 0, drafts: int = 0) -> bool:
        items = [
            Item(0, 0, 0, start, count + drafts, True, 99, num_drafts=drafts) for count in tokens
        ]
        plan = Plan(1, items=items, num_drafts=drafts * len(items))
        sequences[0].drafter_has_kv = True
        speculation.choose_draft_extend(plan, sequences)  # type: ignore[arg-type]
        assert sequences[0].drafter_has_kv == plan.draft_extend
        return plan.draft_extend

    speculation = Speculation(config)
    for rows, seconds in ((1, 1.0), (2, 1.1), (8, 4.0), (16, 8.0)):
        speculation.costs.record(rows, seconds)
    speculation.costs.record(2, 1.15, Passes(1, 1))
    assert extends(100) and not extends(300), "a long prompt"
    sequences[0].token_limit = 30
    assert not extends(100), "a short reply"
    sequences[0].token_limit = 500
    assert extends(1, start=None)
    assert not extends(*[1] * 8, start=None), "many sequences"
    assert all(extends(1, start=None) for _ in range(MAX_UNDRAFTED_EXTENDS))
    assert not extends(1, start=None), "no drafts for a while"
    assert all(extends(1, start=None, drafts=1) for _ in range(2 * MAX_UNDRAFTED_EXTENDS))


def test_costs_are_estimated_between_and_beyond_measured_sizes() -> None:
    table = CostTable()
    assert table.estimate(5) == 0.0 and not table.covers(1)
    table.record(4, 2.0)
    assert table.estimate(1) == table.estimate(9) == 2.0
    assert table.covers(4) and not table.covers(1) and not table.covers(5)
    table.record(8, 4.0)
    assert table.estimate(6) == 3.0 and table.estimate(16) == 8.0
    for _ in range(30):
        table.observe(8, 4.0)
    table.observe(8, 1000.0)
    assert table.means[1] == pytest.approx(4.2), "a step that was interrupted counts little"
    table.forget()
    assert table.estimate(4) < 2.0


def test_one_slow_step_does_not_make_a_size_expensive_for_ever() -> None:
    table = CostTable()
    table.record(1, 3.4)
    table.record(8, 5.6)
    table.observe(5, 20.0)
    assert table.estimate(4) <= table.estimate(5) <= table.estimate(6) <= 6.5
    for _ in range(20):
        table.observe(5, 5.0)
    assert table.estimate(5) == pytest.approx(5.0, abs=0.3)


def test_a_pass_is_never_free() -> None:
    costs = StepCosts()
    costs.record(1, 4.0)
    costs.record(3, 6.0)
    costs.record(3, 5.0, Passes(2, 1))  # The step without drafts was disturbed.
    assert costs.seconds(3, Passes(2, 1)) > costs.seconds(3)
    for _ in range(300):
        costs.observe(1, 4.0)
        costs.observe(3, 8.0, Passes(2, 1))
    assert costs.seconds(3, Passes(2, 1)) / costs.seconds(1) == pytest.approx(2.0, abs=0.1)


def test_a_slower_machine_changes_no_relation_of_costs() -> None:
    """Only steps with drafts run while another program slows the machine down."""
    costs = StepCosts()
    for rows in (1, 4, 8):
        costs.record(rows, 3.0 + rows)
    costs.record(4, 8.0, Passes(2, 1))
    for _ in range(200):
        costs.observe(4, 16.0, Passes(2, 1))
    assert costs.slowdown > 1.7
    assert costs.seconds(4, Passes(2, 1)) / costs.seconds(1) == pytest.approx(2.0, abs=0.3)


def test_a_table_of_costs_stays_small() -> None:
    table = CostTable()
    for rows in range(1, 5000):
        table.observe(rows, float(rows))
    assert table.rows[:16] == list(range(1, 17)) and len(table.rows) < 100
    assert table.estimate(1000) == pytest.approx(1000, rel=0.1)


def test_a_step_without_drafts_is_measured_again_from_time_to_time() -> None:
    speculation = Speculation(SpeculativeConfig("device", num_tokens=2))
    for rows in (1, 2, 3):
        speculation.costs.record(rows, 1.0)  # more rows cost nothing, so drafts always pay
    sequence = SimpleNamespace(
        planned=9, tokens=[0] * 9, guide=None, drafter_has_kv=True, draft_acceptance=0.9
    )
    counts = []
    for step in range(2 * MAX_DRAFTED_STEPS + 3):
        step_drafts = speculation.begin_step(num_decoding=1, max_rows=8)
        count = step_drafts.propose(sequence, room=8)[1]  # type: ignore[arg-type]
        item = Item(0, 0, 0, None, 1 + count, True, 99, num_drafts=count)
        plan = Plan(step, items=[item], num_drafts=count)
        speculation.observe_step(StepLanded(plan=plan, result=StepResult([[0]]), seconds=1.0))
        counts.append(count)
    assert counts == [*[2] * MAX_DRAFTED_STEPS, 0] * 2 + [2]


def test_costs_never_fall_with_the_number_of_rows() -> None:
    random = Random(0)
    table = CostTable()
    for _ in range(500):
        table.observe(random.randrange(1, 40), random.uniform(1.0, 9.0))
        costs = [table.estimate(rows) for rows in range(1, 50)]
        assert costs == sorted(costs)
    totals = [
        sum(value * count for value, count in zip(values, table.counts, strict=True))
        for values in (table.means, table.costs)
    ]
    assert totals[0] == pytest.approx(totals[1]), "groups have the mean of their sizes"


# ---- structured output, costs, settings --------------------------------------------------------


def test_structured_output_is_the_same_and_drafted_for() -> None:
    spec = dict(structured_outputs=StructuredOutputsParams(regex="(ab|cd){8}x"), ignore_eos=False)
    want = run(make(None), temperature=1.0, seed=2, **spec)
    llm = make("ngram,k=4,min=1,adaptive=no")
    assert run(llm, temperature=1.0, seed=2, **spec) == want
    assert counters(llm).accepted > 0


def test_drafts_that_cost_more_than_they_bring_are_not_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make("early_exit,layer=1,k=4")
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    for rows in range(1, 30):
        speculation.costs.record(rows, 0.01 * rows)  # every row costs as much as a step
    monkeypatch.setattr(speculation.costs, "observe", lambda *measured: None)
    run(llm, temperature=1.0, seed=1)
    assert counters(llm).drafted == 0


@pytest.mark.parametrize("method", ["draft_model,model=ITSELF", "head,model=HEAD", "ngram"])
def test_the_warm_up_measures_a_pass_and_counts_no_drafts(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(method)
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    num_drafts: list[int] = []
    launch = llm.runner.launch

    def recording(plan: Plan) -> Any:
        num_drafts.append(plan.num_drafts)
        return launch(plan)

    def record(num_rows: int, seconds: float, passes: Passes = NO_PASSES) -> None:
        assert seconds > 0
        measured.append((num_rows, *passes))

    measured: list[tuple[int, int, int]] = []
    monkeypatch.setattr(llm.runner, "launch", recording)
    monkeypatch.setattr(speculation.costs, "record", record)
    llm.warm_up()
    rows = [(1, 0, 0), (2, 0, 0), (4, 0, 0)]
    assert measured == (rows if method == "ngram" else [*rows, (5, 4, 1), (20, 4, 4)])
    assert max(num_drafts) == (0 if method == "ngram" else 16)
    assert speculation.counters == DraftCounters([0] * 4)
    assert (speculation.max_drafts, speculation.adaptive) == (4, True)


def test_vllms_dictionary_is_understood() -> None:
    llm = make({"model": model_dir(), "num_speculative_tokens": 2})
    config = llm.engine.scheduler.schedule.speculative
    assert config is not None
    assert (config.method, config.num_tokens) == ("draft_model", 2)
    llm = make({"method": "eagle3", "model": head_dir(), "num_speculative_tokens": 2})
    config = llm.engine.scheduler.schedule.speculative
    assert config is not None
    assert (config.method, config.num_tokens) == ("head", 2)
    llm = make({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    config = llm.engine.scheduler.schedule.speculative
    assert config is not None
    assert (config.num_tokens, config.ngram_min, config.ngram_max) == (3, 2, 2)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("magic", "no method 'magic'"),
        ("ngram,k", "'k' has no value"),
        ("ngram,k=0", "at least 1 and at most 16"),
        ("ngram,k=two", "whole number"),
        ("ngram,layer=3", "no setting 'layer'"),
        ("ngram,min=4,max=2", "min is larger than max"),
        ("ngram,adaptive=perhaps", "yes or no"),
        ("early_exit", "early_exit,layer=8"),
        ("draft_model", "draft_model,model=DIRECTORY"),
        ("draft_model,model=", "must be a directory or a model's name"),
        ({"model": 3}, "must be a directory or a model's name"),
        ("early_exit,layer=2", "the model has 2 layers"),
        ("{not json", "not valid JSON"),
        (7, "METHOD[,k=N...]"),
    ],
)
def test_wrong_settings_are_refused(value: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem.replace("[", r"\[").replace(".", r"\.")):
        make(value)


@pytest.mark.parametrize("method", [*METHODS, "ngram,min=3", "early_exit,layer=1"])
def test_a_description_means_the_same_method(method: str) -> None:
    config = parse_speculative("speculative_config", method)
    assert parse_speculative("speculative_config", describe(config)) == config


def test_a_description_names_no_directory() -> None:
    config = parse_speculative("speculative_config", "draft_model,model=/a/b/small")
    assert describe(config) == "draft_model,k=4,adaptive=yes,model=small"


def test_bounded_kv_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="leave out kv_eviction"):
        make("ngram", kv_eviction="sinks", kv_budget=32)


@pytest.mark.parametrize("method", METHODS)
def test_a_request_counts_its_drafts(method: str) -> None:
    llm = make(method)
    params = SamplingParams(temperature=0.01, seed=3, n=2, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(texts(), params, use_tqdm=False)
    assert sum(output.num_accepted_drafts for output in outputs) == counters(llm).accepted > 0
    verified = sum(output.num_accepted_drafts + output.num_rejected_drafts for output in outputs)
    assert verified == counters(llm).drafted


def test_accepted_drafts_behind_the_end_of_a_reply_count_as_rejected() -> None:
    llm = make("early_exit,layer=1,k=8,adaptive=no")
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=list(range(40, 80)))
    outputs = llm.generate(texts(), params, use_tqdm=False)
    for output in outputs:
        assert output.num_accepted_drafts <= len(output.outputs[0].token_ids)
    verified = sum(output.num_accepted_drafts + output.num_rejected_drafts for output in outputs)
    assert verified == counters(llm).drafted > 0


def test_without_speculation_no_drafts_are_counted() -> None:
    (output,) = make(None).generate(texts()[:1], SamplingParams(max_tokens=4), use_tqdm=False)
    assert output.num_accepted_drafts == output.num_rejected_drafts == 0
