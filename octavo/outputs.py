"""The results of LLM.generate. The names follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position, under the model's own distribution."""

    logprob: float
    rank: int | None = None  # 1 is the most likely token
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. `LLM.stream` yields objects that hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended the text
    error: str | None = None  # the reason for finish_reason "error"

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One result of a beam search; the tokens include the prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # logprobs of the generated tokens
    cum_logprob: float = 0.0  # sum of the log-probabilities
    text: str | None = None
    finish_reason: str | None = None  # "stop" | "length" | "error"
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The results of a beam search for one prompt, best first."""

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times on the monotonic clock in seconds. Arrival is before tokenization."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = field(default=None)
    # Speculative decoding: drafts that became tokens of the reply, and those that did not.
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    pooled: bytes | None = None  # float32 hidden states, of a request for embeddings


# ---- pooling -----------------------------------------------------------------------------------


@dataclass(slots=True)
class PoolingOutput:
    """A tensor: an embedding [hidden], or the states of every token [tokens, hidden]."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ScoringOutput:
    score: float  # the cosine of two embeddings, -1 to 1


@dataclass(slots=True)
class PooledRequest:
    """The common fields of pooling results."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(PooledRequest):
    outputs: PoolingOutput


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput(PooledRequest):
    outputs: EmbeddingOutput


@dataclass(slots=True, kw_only=True)
class ScoringRequestOutput(PooledRequest):
    outputs: ScoringOutput
