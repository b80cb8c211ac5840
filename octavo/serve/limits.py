"""All limits on what a client may send. `/v1/limits` returns them.

A limit that is declared with an Option is also an option of `octavo serve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from octavo.option_declaration import Option, check_options, integer_range
from octavo.params import MAX_BEAMS


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 8 * 2**20
    body_memory: int = 256 * 2**20  # The bytes of all bodies that are not parsed yet.
    body_memory_per_address: int = 64 * 2**20
    values: int = 65_536  # Strings, numbers, lists and objects in a body, besides token ids.
    unknown_fields: int = 256  # A request with more unknown fields is refused.
    header_bytes: int = 64 * 2**10
    headers: int = 256
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    text_seconds: float = 10.0  # The time of a worker process to parse, tokenise or render.
    text_memory: int = 768 * 2**20  # The bytes that a worker process may use for one input.
    template_chars: int = 256 * 2**10  # The length of a chat template in a request.
    template_seconds: float = 3.0  # The time to render a chat template in a request.
    idle_seconds: float = 30.0  # A connection without a request is closed after this time.
    send_seconds: float = 20.0  # A client that reads nothing is disconnected after this time.
    # HTTP and WebSocket connections. gRPC connections and gRPC calls have the same limit.
    connections: Annotated[
        int,
        Option(
            "Maximum number of open connections.",
            "Load",
            metavar="N",
            flag="--max-connections",
            reads="size",
            show_default=True,
            check=integer_range(1),
        ),
    ] = 8192
    # An IPv6 network of 64 bits counts as one address. gRPC calls have the same limit.
    connections_per_address: Annotated[
        int,
        Option(
            "Maximum number of open connections from one address, such as a reverse proxy.",
            "Load",
            metavar="N",
            flag="--max-connections-per-address",
            reads="size",
            show_default=True,
            check=integer_range(1),
        ),
    ] = 4096
    connections_per_key: int = 4096
    # Pings, pongs and fragments below 1 KiB, per minute and connection.
    websocket_small_frames: int = 1200
    websocket_errors: int = 60  # Invalid messages per minute and connection.
    watchers: Annotated[
        int,
        Option(
            "Maximum number of open live pages; 0 disables the live page.",
            "Load",
            metavar="N",
            flag="--max-watchers",
            show_default=True,
            check=integer_range(0),
        ),
    ] = 8
    messages: int = 4096
    parts: int = 4096  # The parts of all messages together.
    tools: int = 128
    tool_chars: int = 256 * 2**10  # The length of all tools together, as JSON.
    prompts: int = 2048  # The prompts of one request.
    prompt_tokens: int = 2**20  # The tokens of all prompts of one request.
    n: int = 128
    best_of: int = 20
    beams: int = MAX_BEAMS
    sequences: int = 2048  # Prompts x n (or best_of) of one request.
    stops: int = 64  # vLLM and OpenAI allow 4, and older versions of vLLM allow any number.
    stop_chars: int = 1024
    logit_bias: int = 1024
    structure_bytes: int = 256 * 2**10  # The length of a schema, a grammar or all choices.
    structure_seconds: float = 5.0  # The time of a trial compilation in a worker process.
    token_ids: int = 4096  # The items of stop_token_ids.
    top_logprobs: int = 20
    completion_logprobs: int = 20  # OpenAI allows 5, but clients of vLLM request more.
    logprob_entries: int = 2_000_000  # Prompt positions x logprobs of each.
    embedding_values: int = 8_388_608  # The numbers in a reply with embeddings.
    salt_chars: int = 256
    label_chars: int = 128
    timeout_seconds: float = 3600.0
    # Stored responses of the Responses API. The oldest are dropped first.
    response_bytes: int = 64 * 2**20
    response_seconds: float = 3600.0
    # Sessions of SageMaker.
    sessions: int = 4096
    session_seconds: float = 1200.0
    # Uploaded files, and the output of batches.
    file_bytes: int = 2**30
    upload_bytes: int = 200 * 2**20  # One file.
    batch_lines: int = 50_000  # The requests of one batch.
    batches: int = 256  # The batches that have not ended.
    batches_kept: int = 4096  # All stored batches. The oldest that have ended are dropped first.
    failed_logins: int = 20  # Wrong keys per minute and address.

    def __post_init__(self) -> None:
        check_options(self)
