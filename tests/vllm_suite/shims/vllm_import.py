"""Lets vLLM's tests and examples import `vllm`: its modules are Octavo's of the same name.

The modules in the folder `helpers` are vLLM's own, because tests decode or compare replies with
them. Any other module that Octavo does not have is made up: each of its names is a mock. A test
that calls or reads a mock fails, even if its assertions hold, because they may compare nothing.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import reply_records

import octavo
from octavo.text.tokenizer import Tokenizer


def get_tokenizer(*_: Any, **__: Any) -> Tokenizer:
    from octavo.model.embedded import embedded_path
    from octavo.model.gguf import open_gguf

    return Tokenizer.from_gguf(open_gguf(embedded_path()).gguf_metadata)


class ModelConfig:
    """The properties of the embedded model that tests ask for."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(get_tokenizer())


class HfTokenizer:
    """The embedded model's tokenizer with the results of transformers 5."""

    def __init__(self) -> None:
        self._own = get_tokenizer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own)

    def __call__(self, text: Any, **options: Any) -> Any:
        options.pop("return_tensors", None)
        return self._own(text, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        for name in ("return_tensors", "padding"):
            options.pop(name, None)
        return self._own.apply_chat_template(messages, **options)


def offline_tokenizers() -> None:
    """Let transformers find the embedded model's tokenizer under every name."""
    import transformers

    made = classmethod(lambda cls, *_, **__: HfTokenizer())
    transformers.AutoTokenizer.from_pretrained = made


class Environment(types.ModuleType):
    """vLLM's module of environment variables."""

    VLLM_SERVER_DEV_MODE = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


OWN: dict[str, dict[str, Any]] = {
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": get_tokenizer},
    "vllm.version": {"__version__": octavo.__version__},
    "vllm.exceptions": {"VLLMValidationError": ValueError},
}
# The modules of vLLM's own that tests decode or compare replies with.
HELPERS = Path(__file__).with_name("helpers")
# Helpers of tests that need vLLM or images.
MADE_UP = ("tests.models", "tests.ci_envs", "PIL", "soundfile")
RECORDS = {
    "EmbeddingResponse": reply_records.EmbeddingResponse,
    "PoolingResponse": reply_records.PoolingResponse,
    "RerankResponse": reply_records.RerankResponse,
    "ScoreResponse": reply_records.ScoreResponse,
    "BatchRequestOutput": reply_records.BatchRequestOutput,
    "TokenizeResponse": reply_records.TokenizeResponse,
}


used_names: list[str] = []  # the made-up names that the running test used


class MadeUpName(MagicMock):
    """Accepts every use, and notes it."""

    def _mock_call(self, *args: Any, **options: Any) -> Any:
        used_names.append(self._extract_mock_name())
        return super()._mock_call(*args, **options)


class MadeUp(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in RECORDS:
            return RECORDS[name]
        return type(name, (Exception,), {}) if name.endswith("Error") else MadeUpName(name=name)


class VllmFinder:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if name != "vllm" and not name.startswith(("vllm.", *MADE_UP)):
            return None
        loader: Any = self
        return ModuleSpec(name, loader, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        if spec.name.startswith(MADE_UP):
            return MadeUp(spec.name)
        if spec.name == "vllm.envs":
            return Environment(spec.name)
        if spec.name in OWN:
            made = MadeUp(spec.name)
            vars(made).update(OWN[spec.name])
            return made
        try:
            twin = importlib.import_module("octavo" + spec.name.removeprefix("vllm"))
        except ImportError:
            return MadeUp(spec.name)
        made = MadeUp(spec.name)
        names = {name for name in dir(twin) if not name.startswith("__")}
        names |= set(getattr(twin, "__all__", ()))
        vars(made).update({name: getattr(twin, name) for name in names})
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        path = HELPERS / (module.__name__.replace(".", "/") + ".py")
        if path.exists():
            exec(compile(path.read_text(), str(path), "exec"), vars(module))


sys.meta_path.insert(0, VllmFinder())
offline_tokenizers()
json.JSONEncoder.default = lambda self, value: str(value)  # type: ignore[method-assign]

# ---- which tests apply -------------------------------------------------------------------------

SERVER_NAMES = ("RemoteOpenAIServer", "run_batch", "run-batch")


def applies(item: Any) -> bool:
    """Whether a test asks a server, and not one of vLLM's classes, and needs no adapter."""
    if "lora" in item.name.lower():
        return False
    fixtures = set(getattr(item, "fixturenames", ()))
    if any(name.endswith(("server", "client")) or name.startswith("server") for name in fixtures):
        return True
    source = inspect.getsource(item.function)
    return any(name in source for name in SERVER_NAMES)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    left_out = [item for item in items if not applies(item)]
    items[:] = [item for item in items if applies(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    used_names.clear()
    found = yield
    if used_names:
        pytest.fail(f"made-up names were used: {sorted({*used_names})}"[:300], pytrace=False)
    return found
