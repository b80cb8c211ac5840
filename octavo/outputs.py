"""What LLM.generate returns. Names and shapes are those of vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position, under the model's own distribution."""

    logprob: float
    rank: int | None = None  # 1: the likeliest
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. From `LLM.stream` it holds what is new since the one before it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id or string, where one was given and met
    error: str | None = None  # what went wrong, with finish_reason "error"

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One text of a beam search, with the prompt in front of it."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # of what came after the prompt
    cum_logprob: float = 0.0  # their sum
    text: str | None = None
    finish_reason: str | None = None  # "stop" | "length" | "error"
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Of one prompt: as many as the search was wide, best first."""

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the monotonic clock, from before tokenisation on."""

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
    num_cached_tokens: int = 0  # prompt tokens whose KV the prefix cache had
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = field(default=None)
