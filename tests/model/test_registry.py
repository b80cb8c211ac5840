"""A new architecture is one file; a config.json that cannot be used is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config import ModelConfig
from octavo.errors import InvalidRequest, ModelError, UnknownArchitecture
from octavo.extensions import ARCHITECTURES
from octavo.model import CausalLM, WeightTarget, build, registry
from octavo.model.base import Registry, find_model_class
from octavo.model.layers import Embedding, Linear
from octavo.model.rope import rope_table
from octavo.ops import ForwardBatch, Ops
from octavo.ops.backends import select
from tests.batch import empty_kv, make_batch, scattered_tables

LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


class Toy(CausalLM):
    """One attention layer between an embedding and a head: all that a plug-in has to write."""

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        self.embed = Embedding(ops, config.vocab_size, config.hidden_size)
        self.qkv = Linear(
            ops,
            config.hidden_size,
            {"q": config.hidden_size, "k": config.hidden_size, "v": config.hidden_size},
        )

    @classmethod
    def parse_config(cls, hf: dict[str, Any]) -> ModelConfig:
        return ModelConfig("ToyLM", hf["vocab"], hf["width"], 1, 1, 1, hf["width"], 0, 64)

    def weight_map(self) -> dict[str, WeightTarget]:
        return {"embed": self.embed.weight_target(), **self.qkv.weight_targets("attention.")}

    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        q = self.ops.rope_and_cache(self.qkv(self.embed(batch.ids)), kv[:, 0], batch, None)
        return self.ops.attention(q, kv[:, 0], batch, self.config.scale).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.embed.weight)


def test_a_toy_architecture_registers_and_runs(device: str) -> None:
    own = Registry()
    own.add("ToyLM")(Toy)
    hf = {"architectures": ["ToyLM"], "vocab": 11, "width": 8}
    model = build(own.parse(hf), own.find(hf), select(device), torch.float32, device)
    targets = model.weight_map()
    assert set(targets) == {
        "embed",
        "attention.q.weight",
        "attention.k.weight",
        "attention.v.weight",
    }
    for name, target in targets.items():
        target.fill(torch.eye(*target.dest.shape) * (0 if name == "attention.q.weight" else 1))
    tables = scattered_tables([3], 16)
    hidden = model(
        make_batch([([4, 4, 7], 0)], tables, 16, device), empty_kv(model.config, tables, 16, device)
    )
    # Queries are zero, so attention averages what it sees.
    expected = (
        torch.eye(11, 8, device=device)[[4, 4, 7]].cumsum(0)
        / torch.arange(1, 4, device=device)[:, None]
    )
    torch.testing.assert_close(hidden, expected)
    assert model.logits(hidden).shape == (3, 11)


def test_an_unknown_architecture_is_told_what_there_is() -> None:
    with pytest.raises(
        UnknownArchitecture,
        match="MambaForCausalLM.*GPT2LMHeadModel, Gemma3ForCausalLM, LlamaForCausalLM",
    ):
        registry.find({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(UnknownArchitecture, match="model_type 'mamba'"):
        registry.find({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_attention_heads.*num_key_value_heads"),
        ({"hidden_size": 18}, "hidden_size"),
        ({"head_dim": 5}, "head_dim.*even"),
        ({"hidden_act": "relu"}, "hidden_act.*relu.*silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"torch_dtype": "float8"}, "dtype.*float8.*bfloat16"),
        ({"rope_theta": -1}, "rope_theta"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "longrope.*use one of custom, default, dynamic, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear.*factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "llama3.*low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention"],
            },
            "layer_types",
        ),
        ({"architectures": ["GPT2LMHeadModel"]}, "lacks n_embd"),
    ],
)
def test_an_impossible_config_is_refused_by_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        registry.parse({**LLAMA, **change})


def test_what_a_config_may_leave_out() -> None:
    config = registry.parse(
        {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    )
    assert (config.num_kv_heads, config.head_dim, config.dtype, config.tied, config.eos_ids) == (
        4,
        4,
        "float32",
        False,
        (),
    )
    config = registry.parse(
        {**LLAMA, "torch_dtype": "bfloat16", "eos_token_id": 5, "bos_token_id": 1}
    )
    assert (config.dtype, config.eos_ids, config.bos_id) == ("bfloat16", (5,), 1)
    assert registry.parse({**LLAMA, "dtype": "float16", "eos_token_id": [5, 7]}).eos_ids == (5, 7)
    assert registry.parse({**LLAMA, "architectures": ["Gemma3ForCausalLM"]}).tied


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_both_spellings_of_rope_mean_the_same(scaling: dict[str, Any]) -> None:
    new = registry.parse(
        {**LLAMA, "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": 700.0}}
    )
    assert registry.parse({**LLAMA, "rope_theta": 700.0, "rope_scaling": scaling or None}) == new
    if scaling:
        oldest = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
        assert registry.parse({**LLAMA, "rope_theta": 700.0, "rope_scaling": oldest}) == new


def test_both_spellings_of_gemma_rope_mean_the_same() -> None:
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "head_dim": 8}
    linear = {"rope_type": "linear", "factor": 8.0}
    old = registry.parse(
        {
            **gemma,
            "sliding_window_pattern": 2,
            "rope_theta": 900.0,
            "rope_local_base_freq": 90.0,
            "rope_scaling": linear,
        }
    )
    both = {
        "full_attention": {**linear, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    }
    assert (
        registry.parse(
            {
                **gemma,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": both,
            }
        )
        == old
    )
    assert old.windows == (8, 0)


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    {"rope_type": "custom", "factors": [1.0, 1.0]},
]
GEMMA: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 90.0,
    "query_pre_attn_scalar": 4.0,
}
LARGE: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "eos_token_id": 1}
EXTREME = [
    10**400,
    2**63,
    2**31,
    -(10**400),
    1e308,
    5e-324,
    1e-30,
    float("inf"),
    float("nan"),
    -0.0,
]


@pytest.mark.parametrize("base", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_extreme_numbers_are_used_or_refused_in_every_field(base: dict[str, Any]) -> None:
    """A number that no float or tensor can hold ends in a ModelError and never in another error."""
    whole = base | LARGE
    configs = [whole | {name: bad} for name in whole for bad in EXTREME]
    for scaling in SCALINGS:
        for name in scaling:
            for bad in (*EXTREME, [], "1", [10**400, 1.0], [5e-324, 1.0]):
                configs.append(whole | {"rope_scaling": scaling | {name: bad}})
    refused = 0
    for config in configs:
        try:
            parsed = registry.parse(config)
            if max(parsed.head_dim, parsed.max_position) < 10_000:
                rope_table(parsed.rope, parsed.head_dim, min(parsed.max_position, 64))
        except ModelError:
            refused += 1
    assert refused > len(configs) / 2


def test_a_huge_rope_factor_is_refused_by_name() -> None:
    for factor in (10**400, 1e300):
        scaling = {"rope_type": "linear", "factor": factor}
        with pytest.raises(ModelError, match="'linear' needs factor as a number from 1e-18 to 1e"):
            registry.parse({**LLAMA, "rope_scaling": scaling})


def test_dynamic_rope_is_the_default_within_the_context() -> None:
    default, dynamic = (
        registry.parse(LLAMA).rope,
        registry.parse({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}).rope,
    )
    torch.testing.assert_close(
        rope_table(dynamic, 8, 64), rope_table(default, 8, 64), rtol=0, atol=0
    )


def test_a_tied_model_needs_no_head() -> None:
    for tied in (True, False):
        hf = {**LLAMA, "tie_word_embeddings": tied}
        model = build(registry.parse(hf), registry.find(hf), select("cpu"), torch.float32, "cpu")
        assert ("lm_head.weight" in model.weight_map()) is not tied
        assert "model.layers.1.self_attn.rotary_emb.inv_freq" in model.ignored_weights()
        assert "lm_head.weight" not in model.ignored_weights()


# ---- architectures of installed packages ---------------------------------------------------------

PLUGIN = """
from octavo.model import registry
from octavo.model.decoder import Decoder

@registry.add("PluginForCausalLM")
class Plugin(Decoder):
    @classmethod
    def parse_config(cls, hf):
        return Decoder.parse_config({**hf, "architectures": ["LlamaForCausalLM"]})
"""


def install(folder: Path, source: str, name: str = "PluginForCausalLM") -> None:
    """What pip leaves behind of a package with one module and an entry point."""
    (folder / "plugin_architecture.py").write_text(source)
    about = folder / "plugin_architecture-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plugin-architecture\nVersion: 1.0\n"
    )
    (about / "entry_points.txt").write_text(f"[{ARCHITECTURES}]\n{name} = plugin_architecture\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.delitem(sys.modules, "plugin_architecture", raising=False)
    return tmp_path


def test_an_installed_package_adds_an_architecture(packages: Path) -> None:
    install(packages, PLUGIN)
    config = registry.parse({**LLAMA, "architectures": ["PluginForCausalLM"]})
    assert config.hidden_size == LLAMA["hidden_size"]


def test_a_plugin_that_cannot_be_imported_is_named(packages: Path) -> None:
    install(packages, "raise ValueError('broken')", "OtherForCausalLM")
    with pytest.raises(
        ModelError, match="plugin plugin_architecture cannot be imported: ValueError: broken"
    ):
        registry.find({"architectures": ["OtherForCausalLM"]})


def test_a_class_is_given_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "class_by_name.py").write_text(PLUGIN)
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.chdir(tmp_path)
    assert find_model_class("class_by_name:Plugin").__name__ == "Plugin"
    with pytest.raises(InvalidRequest, match="'json:loads' is not a subclass of octavo.model"):
        find_model_class("json:loads")
    with pytest.raises(InvalidRequest, match="model_class 'no_such:Plugin' cannot be loaded"):
        find_model_class("no_such:Plugin")
