"""The parts of the front process that all transports share, and the caller of a request."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import Protocol

from octavo import __version__
from octavo.serve.api.api_errors import not_ready
from octavo.serve.channel.jobs import Setup
from octavo.serve.channel.messages import Loaded
from octavo.serve.front.batch_store import BatchStore, StoredBatch
from octavo.serve.front.body_memory import BodyMemory
from octavo.serve.front.engine_client import EngineClient
from octavo.serve.front.event_buffer import EventBuffer
from octavo.serve.front.file_store import FileStore
from octavo.serve.front.keys import Key, Keys
from octavo.serve.front.metrics import Metrics
from octavo.serve.front.response_store import ResponseStore
from octavo.serve.front.sagemaker_sessions import SagemakerSessions
from octavo.serve.front.tokenize import Texts
from octavo.serve.front.tracing import ServerSpan, Tracing
from octavo.serve.front.trials import Trials
from octavo.serve.front.worker_pool import WorkerPool
from octavo.serve.serve_config import ServeConfig
from octavo.serve.workers.handlers import Context
from octavo.text.tokenizer import Tokenizer


class BatchStarter(Protocol):
    """The interface of the batch runner for the routes."""

    def wake(self) -> None: ...

    def cancel(self, batch: StoredBatch) -> None: ...


class Front:
    """Owns the parts of the front process that all connections share."""

    def __init__(self, config: ServeConfig):
        self.config = config
        self.keys = Keys.read(config.keys_file, config.limits, config.api_keys)
        self.metrics = Metrics(config.metrics_prefix, config.name)
        self.engine_client = EngineClient(config, self.metrics)
        self.metrics.source.engine_client = self.engine_client
        self.tracing: Tracing | None = None
        if config.otlp_traces_endpoint is not None:
            self.tracing = Tracing(config.otlp_traces_endpoint, config.name)
            self.engine_client.tracing = self.tracing
        self.pool = WorkerPool(config.text_workers, config.limits.text_seconds)
        self.engine_client.trials = Trials(self.pool, config.limits.structure_seconds)
        self.text = Texts(self.pool, config.limits.template_seconds, lambda: self.idle)
        self.bodies = BodyMemory(config.limits)
        self.responses = ResponseStore(config.limits)
        self.sagemaker_sessions = SagemakerSessions(config.limits)
        self.events = EventBuffer()
        self.files = FileStore(config.files_dir, config.limits)
        self.batches = BatchStore(self.files)
        # The batch runner (endpoints/batch_runner.py), or None if the server runs no batches.
        self.batch_runner: BatchStarter | None = None
        self.engine_client.on_loaded = lambda loaded: self.pool.start(worker_setup(config, loaded))
        self.created = int(time.time())
        self._fingerprint: tuple[Loaded | None, str] = (None, "")

    @property
    def idle(self) -> bool:
        """True if the engine has no requests."""
        return not self.engine_client.open_requests

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint of replies.

        Replies with the same fingerprint were computed by the same version with the same settings.
        """
        loaded = self.engine_client.model
        if self._fingerprint[0] is not loaded:
            engine = asdict(self.config.engine)
            settings = [self.config.model, engine, loaded.dtype, loaded.kv_dtype]
            text = json.dumps([*settings, loaded.device, loaded.architecture], sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            self._fingerprint = loaded, f"octavo-{__version__}-{digest}"
        return self._fingerprint[1]

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine_client.tokenizer is None:
            supervisor = self.engine_client.supervisor
            raise not_ready(supervisor.phase, supervisor.restarting)
        return self.engine_client.tokenizer

    @property
    def context(self) -> Context:
        """The data that jobs need when the event loop runs them itself."""
        model = self.engine_client.model
        return Context(self.tokenizer, model.vocab_size, model.max_model_len, self.config.limits)

    def check_may_send(self, caller: Caller) -> None:
        """Raise ApiError if no request of the caller may be sent to the engine now.

        The engine may not be ready, the queue may be full, or the key may have reached a limit.
        This is checked before the body is received.
        """
        if caller.key is not None:
            caller.key.check()
        self.engine_client.check_may_send(caller.key_priority)


def worker_setup(config: ServeConfig, loaded: Loaded) -> Setup:
    """Return the first message to the worker processes."""
    return Setup(
        tokenizer_directory=loaded.tokenizer_directory,
        tokenizer_gguf=loaded.tokenizer_gguf,
        chat_template=config.chat_template,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        limits=config.limits,
    )


def new_id() -> str:
    return f"req_{secrets.token_hex(14)}"  # vLLM's ids have 32 characters too.


@dataclass
class Caller:
    """The client of one request: its key, and when the request arrived."""

    # The server creates this id. An id from the client is only a label.
    id: str = field(default_factory=new_id)
    arrival: float = field(default_factory=time.monotonic)
    key: Key | None = None
    timeout: float | None = None  # The seconds from a header of the request.
    span: ServerSpan | None = None  # None means that tracing is off.

    @property
    def owner(self) -> str:
        return self.key.name if self.key else ""

    @property
    def log_fields(self) -> str:
        """The end of the line that the log has for each request: its owner and its trace."""
        owner = f" {self.owner}" if self.owner else ""
        return owner if self.span is None else f"{owner} trace_id={self.span.trace_id}"

    @property
    def salt(self) -> str:
        """The cache salt. Each key has its own, so different keys never share cached blocks."""
        return self.key.salt if self.key else ""

    @property
    def key_priority(self) -> int:
        """The priority of the key. Unlike the priority of a request, higher numbers come first."""
        return self.key.priority if self.key else 0
