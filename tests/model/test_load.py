"""Checkpoints are found, checked before they are believed, and streamed into models."""

from __future__ import annotations

import gc
import http.server
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo import LLM
from octavo.config import ModelConfig
from octavo.errors import (
    CheckpointError,
    ModelError,
    ModelNotFound,
    NotEnoughMemory,
    OctavoError,
    UnknownArchitecture,
)
from octavo.model import load
from octavo.model.base import CausalLM, WeightTarget, build, registry
from octavo.model.checkpoint import (
    DTYPES,
    Checkpoint,
    StoredTensor,
    open_directory,
    open_safetensors,
    read_header,
)
from octavo.model.load import LoadOptions, dummy_weights, load_model, load_weights, open_checkpoint
from octavo.text.tokenizer import Tokenizer
from tests import tiny

CONFIG = {"architectures": ["ToyForCausalLM"], "eos_token_id": 1, "torch_dtype": "float32"}
SHAPES = {
    "embed.weight": (10, 4),
    "q.weight": (4, 4),
    "kv.weight": (8, 4),
    "proj.weight": (4, 6),
    "norm.weight": (4,),
}
NO_OPS: Any = SimpleNamespace(name="none")  # nothing is computed


@registry.add("ToyForCausalLM")
class Toy(CausalLM):
    """Two checkpoint tensors fused into one parameter, one transposed, one known under a longer
    name."""

    def __init__(self, config: ModelConfig, ops: Any):
        super().__init__(config, ops)
        self.embed = nn.Parameter(torch.empty(10, 4))
        self.qkv = nn.Parameter(torch.empty(12, 4))
        self.proj = nn.Parameter(torch.empty(6, 4))
        self.norm = nn.Parameter(torch.empty(4))
        self.bias = nn.Parameter(torch.empty(4))
        self.finished = 0

    @classmethod
    def parse_config(cls, hf: dict[str, Any]) -> ModelConfig:
        return ModelConfig("toy", 10, 4, 1, 1, 1, 4, 8, 16, dtype=hf["torch_dtype"])

    def weight_map(self) -> dict[str, WeightTarget]:
        return {
            "embed.weight": WeightTarget(self.embed),
            "q.weight": WeightTarget(self.qkv[:4]),
            "kv.weight": WeightTarget(self.qkv[4:]),
            "proj.weight": WeightTarget(self.proj, lambda weight: weight.t()),
            "norm.weight": WeightTarget(self.norm),
        }

    @classmethod
    def canonical_name(cls, name: str) -> str:
        return name.removeprefix("model.")

    def ignored_weights(self) -> set[str]:
        return {"rotary.inv_freq"}

    def finish_loading(self) -> None:
        self.finished += 1


def toy(dtype: torch.dtype = torch.float32) -> Toy:
    model = build(Toy.parse_config(CONFIG), Toy, NO_OPS, dtype, "cpu")
    assert isinstance(model, Toy)
    return model


def weights(**changed: tuple[int, ...] | None) -> dict[str, Tensor]:
    """The toy's tensors; a changed shape replaces or adds one, None leaves one out."""
    torch.manual_seed(0)
    shapes = SHAPES | {name.replace("__", "."): shape for name, shape in changed.items()}
    return {name: torch.randn(shape) for name, shape in shapes.items() if shape is not None}


def in_memory(tensors: dict[str, Tensor]) -> Checkpoint:
    stored = {
        name: StoredTensor(tuple(t.shape), t.nbytes, lambda t=t: t) for name, t in tensors.items()
    }
    return Checkpoint("memory", CONFIG, stored)


def write_directory(
    folder: Path, tensors: dict[str, Tensor] | None = None, config: dict[str, Any] = CONFIG
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with any header whatever."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


# ---- safetensors files ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_reads_back_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    want = torch.randint(0, 2, (3, 5)).to(dtype)
    save_file(
        {"a": want, "empty": want[:0], "scalar": want[0, 0].clone()}, tmp_path / "x.safetensors"
    )
    got = {
        name: tensor.read() for name, tensor in open_safetensors(tmp_path / "x.safetensors").items()
    }
    assert (
        got["a"].dtype == dtype
        and got["a"].shape == (3, 5)
        and torch.equal(got["a"].float(), want.float())
    )
    assert got["empty"].shape == (0, 5) and got["scalar"].shape == ()


def test_unaligned_tensors_read_back_exactly(tmp_path: Path) -> None:
    data = b"\x07" + struct.pack("<2f", 1.5, -2.0)
    path = write_raw(
        tmp_path / "x.safetensors", {"odd": entry(0, 1), "floats": entry(1, 9, [2], "F32")}, data
    )
    floats = open_safetensors(path)["floats"].read()
    assert floats.tolist() == [1.5, -2.0] and floats.data_ptr() % 4 == 0


def test_tensors_come_in_file_order(tmp_path: Path) -> None:
    path = write_raw(
        tmp_path / "x.safetensors", {"late": entry(2, 4), "early": entry(0, 2)}, b"abcd"
    )
    assert list(open_safetensors(path)) == ["early", "late"]


BAD_HEADERS: dict[str, tuple[object, bytes]] = {
    "not JSON": (b'{"a": ', b""),
    "not UTF-8": (b'{"\xff": 1}', b""),
    "not an object": ([1, 2], b""),
    "nested without end": (b"[" * 100_000, b""),
    "a key twice": (
        b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',) * 2),
        b"x",
    ),
    "entry is no object": ({"a": 3}, b""),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"),
    "unknown dtype": ({"a": entry(0, 1, dtype="Q4")}, b"x"),
    "dtype is a list": ({"a": entry(0, 1, dtype=["U8"])}, b"x"),
    "negative dimension": ({"a": entry(0, 1, [-1])}, b"x"),
    "fractional dimension": ({"a": entry(0, 1, [1.0])}, b"x"),
    "boolean dimension": ({"a": entry(0, 1, [True])}, b"x"),
    "three offsets": ({"a": entry(0, 1) | {"data_offsets": [0, 1, 1]}}, b"x"),
    "end before begin": ({"a": entry(0, 2) | {"data_offsets": [2, 0]}}, b"xx"),
    "too few bytes for the shape": ({"a": entry(0, 4, [2], "F32")}, b"xxxx"),
    "shape overflows 64 bits": ({"a": entry(0, 0, [2**32, 2**32], "U8")}, b""),
    "shape overflows behind a zero": ({"a": entry(0, 0, [2**62, 2**62, 0])}, b""),
    "offsets past the end": ({"a": entry(0, 9)}, b"x"),
    "offsets beyond 64 bits": ({"a": entry(2**64, 2**64 + 1)}, b"x"),
    "offsets of more digits than Python prints": ({"a": entry(10**4300 - 2, 10**4300 - 1)}, b"x"),
    "overlap": ({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx"),
    "gap": ({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx"),
    "bytes that belong to nobody": ({"a": entry(0, 1)}, b"xx"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_damaged_headers_are_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(CheckpointError, match=r"bad\.safetensors is not a valid safetensors file"):
        read_header(write_raw(tmp_path / "bad.safetensors", *BAD_HEADERS[case]))


@pytest.mark.parametrize(
    "raw", [b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"]
)
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "short.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(tmp_path / "short.safetensors")


def test_a_header_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "sparse.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # takes no space on the disk
    with pytest.raises(CheckpointError, match="200000000 bytes, more than 100000000"):
        read_header(tmp_path / "sparse.safetensors")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(tmp_path / "cut.safetensors")


def test_random_damage_ends_in_an_error_or_in_tensors(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(header_end)] = rng.randrange(256)
        (tmp_path / "damaged.safetensors").write_bytes(damaged)
        try:
            for tensor in open_safetensors(tmp_path / "damaged.safetensors").values():
                assert tensor.read().shape == tensor.shape
        except OctavoError:
            refused += 1
    assert refused > 300


# ---- directories ---------------------------------------------------------------------------------


def write_shards(folder: Path, shards: dict[str, dict[str, Tensor]], index: dict[str, str]) -> Path:
    write_directory(folder)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    a, b = torch.ones(2), torch.zeros(3)
    shards = {"one.safetensors": {"a": a}, "two.safetensors": {"b": b}}
    found = open_directory(
        write_shards(tmp_path, shards, {"a": "one.safetensors", "b": "two.safetensors"})
    )
    assert found.shapes == {"a": (2,), "b": (3,)} and found.nbytes == 20
    assert torch.equal(found.read("a"), a) and torch.equal(found.read("b"), b)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(
        tmp_path,
        {"one.safetensors": {"a": torch.ones(2)}},
        {"a": "one.safetensors", "b": "two.safetensors"},
    )
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 shards: two\.safetensors"):
        open_directory(tmp_path)


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    write_shards(
        tmp_path,
        {"one.safetensors": {"a": torch.ones(2)}},
        {"a": "one.safetensors", "b": "one.safetensors"},
    )
    with pytest.raises(CheckpointError, match=r"one\.safetensors lacks tensors .*: b$"):
        open_directory(tmp_path)


def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    write_shards(tmp_path / "model", {}, {"a": "../outside.safetensors"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of 1 shards: \.\./outside"):
        open_directory(tmp_path / "model")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, index: str) -> None:
    (write_directory(tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_directory(tmp_path)


def test_files_that_repeat_a_tensor_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(2)}, write_directory(tmp_path) / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"repeats tensors.*: a$"):
        open_directory(tmp_path)


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path: Path) -> None:
    (write_directory(tmp_path) / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*Convert them to safetensors"):
        open_checkpoint(str(tmp_path))


def test_end_tokens_of_both_configs_count(tmp_path: Path) -> None:
    write_directory(tmp_path, weights())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1], "temperature": 0.6}')
    found = open_checkpoint(str(tmp_path))
    assert found.config["eos_token_id"] == [1, 7]
    assert found.generation_config["temperature"] == 0.6 and found.directory == tmp_path


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))


def test_a_directory_with_an_adapter_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds an adapter \(LoRA\).*merge"):
        open_checkpoint(str(tmp_path))


def test_a_directory_of_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path))


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["", "/", "/tree/main"])
def test_the_page_of_a_model_names_the_model(rest: str) -> None:
    with pytest.raises(ModelNotFound, match=r"the name of the model, Qwen/Qwen3-0\.6B$"):
        open_checkpoint(f"https://huggingface.co/Qwen/Qwen3-0.6B{rest}")


@pytest.mark.parametrize(
    "name",
    ["/no/such/place", "./here", "no/such/place", "absent.gguf", "org/absent.gguf", "sp ace", ""],
)
def test_what_cannot_be_a_hub_name_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_from_hub", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir("/")
    with pytest.raises(OctavoError):
        open_checkpoint(name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, offline."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_offline_and_not_cached_says_what_can_be_given(hub: Path) -> None:
    with pytest.raises(
        ModelNotFound,
        match=r"(?s)no model org/name.*HF_HOME.*download.* failed.*Give a \.gguf file.*directory.*smollm2",
    ):
        open_checkpoint("org/name")


def test_a_name_like_that_of_the_embedded_model_is_explained(hub: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"Did you mean smollm2\? Give a \.gguf file"):
        open_checkpoint("smollm3")


def test_a_cached_snapshot_serves_when_the_hub_cannot_be_reached(hub: Path) -> None:
    cached = hub / "models--org--name"
    write_directory(cached / "snapshots" / ("0" * 40), weights())
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    assert open_checkpoint("org/name").shapes == SHAPES


def test_a_hub_that_does_not_answer_costs_seconds_only(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(load, "HUB_TIMEOUT", 0.5)
        started = time.monotonic()
        with pytest.raises(ModelNotFound, match="imeout|timed out"):
            open_checkpoint("org/name")
        assert time.monotonic() - started < 5


class Refusing(http.server.BaseHTTPRequestHandler):
    status = 401

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_a_hub_that_refuses_is_quoted_in_one_line(
    hub: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(Refusing, "status", status)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        started = time.monotonic()
        with pytest.raises(ModelNotFound) as caught:
            open_checkpoint("org/name")
        server.shutdown()
    assert (
        str(status) in str(caught.value)
        and "Give a .gguf file" in str(caught.value)
        and "\n" not in str(caught.value)
    )
    assert time.monotonic() - started < 5


# ---- into the model ------------------------------------------------------------------------------


def test_weights_go_where_the_map_says() -> None:
    model, given = toy(torch.float64), weights()
    load_weights(model, in_memory(given), progress=False)
    assert torch.equal(model.embed, given["embed.weight"].double())
    assert torch.equal(model.qkv, torch.cat([given["q.weight"], given["kv.weight"]]).double())
    assert torch.equal(model.proj, given["proj.weight"].t().double())
    assert model.finished == 1


def test_names_are_made_canonical_and_known_leftovers_ignored() -> None:
    model, given = toy(), weights(rotary__inv_freq=(3,))
    load_weights(
        model,
        in_memory({f"model.{name}": tensor for name, tensor in given.items()}),
        progress=False,
    )
    assert torch.equal(model.embed, given["embed.weight"])


def test_all_mismatches_are_listed_at_once_and_nothing_is_loaded() -> None:
    model = toy()
    with torch.no_grad():
        model.embed.fill_(7)
    bad = in_memory(
        weights(
            q__weight=None,
            kv__weight=(8, 5),
            proj__weight=(6, 4),
            norm__weight=(1,),
            extra__weight=(2, 2),
        )
    )
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, bad, progress=False)
    text = str(caught.value)
    assert "1 missing:\n  q.weight [4, 4]" in text
    assert "1 unexpected:\n  extra.weight [2, 2]" in text
    assert "3 of the wrong shape:" in text
    assert "  kv.weight [8, 5]: must be [8, 4]" in text
    assert "  proj.weight [6, 4], rearranged (4, 6): must be [6, 4]" in text
    assert "  norm.weight [1]: must be [4]" in text  # would broadcast
    assert bool((model.embed == 7).all()) and not model.finished


def test_two_tensors_for_one_place_are_reported() -> None:
    doubled = weights() | {"model.norm.weight": torch.ones(4)}
    with pytest.raises(CheckpointError, match=r"1 unexpected:\n  model\.norm\.weight \[4\]"):
        load_weights(toy(), in_memory(doubled), progress=False)


def test_long_lists_of_mismatches_are_cut() -> None:
    bad = in_memory(weights() | {f"extra.{i}": torch.ones(1) for i in range(33)})
    with pytest.raises(CheckpointError) as caught:
        load_weights(toy(), bad, progress=False)
    text = str(caught.value)
    assert (
        "33 unexpected:" in text
        and "extra.19" in text
        and "extra.20" not in text
        and "... and 13 more" in text
    )


def test_each_tensor_is_dropped_before_the_next_is_read() -> None:
    alive: list[str] = []

    class Watched(Tensor):
        pass

    def stored(name: str, tensor: Tensor) -> StoredTensor:
        def read() -> Tensor:
            gc.collect()
            alive.extend(name for kept in gc.get_objects() if type(kept) is Watched)
            return tensor.clone().as_subclass(Watched)

        return StoredTensor(tuple(tensor.shape), tensor.nbytes, read)

    checkpoint = Checkpoint(
        "memory", CONFIG, {name: stored(name, tensor) for name, tensor in weights().items()}
    )
    load_weights(toy(), checkpoint, progress=False)
    assert alive == []


PEAK = """
import sys, torch
from pathlib import Path
from octavo.config import ModelConfig
from octavo.model.base import CausalLM, WeightTarget, build
from octavo.model.checkpoint import open_directory
from octavo.model.load import load_weights

class Big(CausalLM):
    def __init__(self, config, ops):
        super().__init__(config, ops)
        self.all = torch.nn.Parameter(torch.ones(10, 5_000_000))
    def weight_map(self):
        return {f"t{i}": WeightTarget(self.all[i]) for i in range(10)}

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

model = build(ModelConfig("big", 1, 1, 1, 1, 1, 1, 1, 1), Big, None, torch.bfloat16, "cpu")
checkpoint = open_directory(Path(sys.argv[1]))
before = peak()
load_weights(model, checkpoint, progress=False)
print((peak() - before) // 1024)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
)
def test_streaming_200_mb_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    write_directory(tmp_path, {f"t{i}": torch.ones(5_000_000) for i in range(10)})
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 40  # MB; a tensor has 20


def test_progress_stays_silent_on_short_loads(capsys: pytest.CaptureFixture[str]) -> None:
    load_weights(toy(), in_memory(weights()), progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


# ---- the whole way -------------------------------------------------------------------------------


def test_load_model_from_a_directory(tmp_path: Path) -> None:
    given = weights()
    model, checkpoint = load_model(
        str(write_directory(tmp_path, given)),
        LoadOptions(dtype="bfloat16"),
        ops=NO_OPS,
        progress=False,
    )
    assert (
        isinstance(model, Toy)
        and model.embed.dtype == torch.bfloat16
        and not model.embed.requires_grad
    )
    assert torch.equal(model.embed, given["embed.weight"].bfloat16())
    assert checkpoint.config["architectures"] == ["ToyForCausalLM"]


def test_auto_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    path = write_directory(tmp_path, weights(), CONFIG | {"torch_dtype": "float16"})
    assert next(load_model(path, ops=NO_OPS, progress=False)[0].parameters()).dtype == torch.float16


def test_dummy_weights_need_only_a_config_and_depend_on_the_seed(tmp_path: Path) -> None:
    made = [
        load_model(write_directory(tmp_path), LoadOptions(load_format="dummy", seed=5), ops=NO_OPS)[
            0
        ],
        load_model(CONFIG, LoadOptions(load_format="dummy", seed=5), ops=NO_OPS)[0],
        load_model(CONFIG, LoadOptions(load_format="dummy", seed=6), ops=NO_OPS)[0],
    ]
    a, b, c = (dict(model.named_parameters()) for model in made)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed"], c["embed"]) and not torch.equal(
        a["embed"][:4], a["proj"][:4]
    )
    assert a["norm"].tolist() == [1] * 4 and a["bias"].tolist() == [0] * 4
    assert 0.01 < a["embed"].std() < 0.03
    assert isinstance(made[0], Toy) and made[0].finished == 1


def test_dummy_weights_fill_low_precision_in_place() -> None:
    model = toy(torch.bfloat16)
    dummy_weights(model, seed=1)
    assert model.embed.dtype == torch.bfloat16 and bool(model.embed.isfinite().all())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"load_format": "pickle"}, ModelError),
        ({"load_format": "auto"}, ModelError),
        ({"load_format": "dummy", "dtype": "int8"}, ModelError),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        load_model(CONFIG, LoadOptions(**options), ops=NO_OPS)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UnknownArchitecture, match="MysteryModel"):
        load_model(
            CONFIG | {"architectures": ["MysteryModel"]},
            LoadOptions(load_format="dummy"),
            ops=NO_OPS,
        )


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    """auto_map in both configs, names of modules that are files beside them, a class that does not
    exist elsewhere."""
    write_directory(tmp_path, weights())
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\nclass Model: pass\n"
    for name in (
        "modeling.py",
        "configuration.py",
        "tokenization.py",
        "__init__.py",
        "conftest.py",
    ):
        (tmp_path / name).write_text(trap)
    maps = {
        "AutoConfig": "configuration.Model",
        "AutoModelForCausalLM": "modeling.Model",
        "AutoTokenizer": ["tokenization.Model"] * 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"auto_map": maps}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": maps, "tokenizer_class": "Model"})
    )
    model, _ = load_model(str(tmp_path), ops=NO_OPS, progress=False)
    assert isinstance(model, Toy)
    with pytest.raises(UnknownArchitecture, match="EvilModel"):
        config = CONFIG | {"auto_map": maps, "architectures": ["EvilModel"]}
        load_model(str(write_directory(tmp_path, weights(), config)), ops=NO_OPS, progress=False)
    with pytest.raises(ModelError):
        Tokenizer.from_directory(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_more_tensors_than_any_model_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.model.checkpoint.MAX_TENSORS", 1000)
    many = {f"t{i}": entry(0, 0) for i in range(1001)}
    with pytest.raises(CheckpointError, match="1001 tensors, more than 1000"):
        read_header(write_raw(tmp_path / "many.safetensors", many))


@pytest.mark.slow
def test_a_million_tensors_cost_seconds_and_little_memory(tmp_path: Path) -> None:
    """The most that is read at all, and one more: which is refused."""
    one = b'"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    for count in (1_000_000, 1_000_001):
        header = b"{" + b",".join(b'"t%d":{%b' % (i, one) for i in range(count)) + b"}"
        path = write_raw(tmp_path / "many.safetensors", header)
        begun = time.monotonic()
        if count > 1_000_000:
            with pytest.raises(CheckpointError, match="more than 1000000"):
                read_header(path)
        else:
            assert len(read_header(path)) == count
        assert time.monotonic() - begun < 30


def test_weights_of_another_dtype_are_converted_and_unknown_ones_refused(tmp_path: Path) -> None:
    given = {name: tensor.half() for name, tensor in weights().items()}
    model, _ = load_model(str(write_directory(tmp_path, given)), ops=NO_OPS, progress=False)
    assert (
        isinstance(model, Toy)
        and model.embed.dtype == torch.float32
        and torch.equal(model.embed, given["embed.weight"].float())
    )
    with pytest.raises(ModelError, match="dtype must be one of auto, .*got 'int4'"):
        load_model(
            str(write_directory(tmp_path, given, CONFIG | {"torch_dtype": "int4"})),
            ops=NO_OPS,
            progress=False,
        )


# ---- memory --------------------------------------------------------------------------------------

EIGHT_BILLION = dict(
    architectures=["LlamaForCausalLM"], vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072,
)  # fmt: skip


def test_a_model_is_checked_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("weights were read"))

    def refuse(planned: CausalLM, checkpoint: Checkpoint) -> None:
        raise NotEnoughMemory(f"{checkpoint.source}: {planned.config.num_layers} layers")

    with pytest.raises(NotEnoughMemory, match="layers"):
        load_model(write_directory(tmp_path, weights()), ops=NO_OPS, check=refuse)


def test_a_model_of_8_billion_weights_is_refused_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.memory_planner.available_memory", lambda device: (2**34, 2**34))
    begun = time.process_time()
    with pytest.raises(NotEnoughMemory) as refused:
        LLM(EIGHT_BILLION, load_format="dummy", skip_tokenizer_init=True, device="cpu")
    message = str(refused.value)
    assert "(weights 30.0 GiB, activations" in message and "and 16.0 GiB are free" in message
    assert "or with quantization='int8' (--quant int8)" in message
    assert time.process_time() - begun < 5


def test_a_config_that_no_machine_can_hold_is_refused() -> None:
    huge = EIGHT_BILLION | {"hidden_size": 2**30, "intermediate_size": 2**31 - 1, "head_dim": 2**30}
    with pytest.raises(ModelError, match="weights that cannot be allocated"):
        load_model(huge, LoadOptions(load_format="dummy"), ops=NO_OPS)
    with pytest.raises(ModelError, match="num_hidden_layers must be at most 1000,"):
        load_model(
            EIGHT_BILLION | {"num_hidden_layers": 10**9},
            LoadOptions(load_format="dummy"),
            ops=NO_OPS,
        )
    with pytest.raises(ModelError, match="vocab_size must be at most 1048576,"):
        load_model(
            EIGHT_BILLION | {"vocab_size": 2**20 + 1}, LoadOptions(load_format="dummy"), ops=NO_OPS
        )


def test_more_layers_than_tensors_are_refused_before_a_model_is_built(tmp_path: Path) -> None:
    config = EIGHT_BILLION | {"num_hidden_layers": 900}
    path = write_directory(tmp_path, {"model.norm.weight": torch.ones(4096)}, config)
    with pytest.raises(CheckpointError, match="900 layers, but holds 1 tensors"):
        load_model(path, ops=NO_OPS, progress=False)


# ---- tokenizers ----------------------------------------------------------------------------------


def test_a_tokenizer_much_smaller_than_the_model_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for vocabulary, warned in ((300, False), (1000, True)):
        caplog.clear()
        fields = dict(tiny.SMALL, vocab_size=vocabulary, architectures=["LlamaForCausalLM"])
        LLM(fields, load_format="dummy", tokenizer=tiny.model_dir(), device="cpu", progress=False)
        assert ("the tokenizer has 262 tokens, but the model has 1,000" in caplog.text) is warned


def test_a_directory_without_a_tokenizer_names_the_option(tmp_path: Path) -> None:
    fields = dict(tiny.SMALL, architectures=["LlamaForCausalLM"])
    path = write_directory(tmp_path, config=fields)
    with pytest.raises(ModelError, match=r"has no tokenizer.*tokenizer=DIRECTORY \(--tokenizer\)"):
        LLM(path, load_format="dummy", device="cpu", progress=False)


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    path = write_directory(tmp_path, weights())
    fractions: list[float] = []
    with pytest.raises(ModelError, match="has no tokenizer"):
        LLM(path, device="cpu", progress=fractions.append)
    assert fractions == []
    LLM(path, device="cpu", progress=fractions.append, tokenizer=tiny.model_dir())
    assert fractions, "the same files can be read"
