"""vLLM's LLMEngine: requests with the caller's own ids, computed one step at a time."""

from __future__ import annotations

from typing import Any

from octavo.compat.partial_outputs import PartialReply
from octavo.errors import InvalidRequest
from octavo.llm import LLM, refuse_adapters
from octavo.llm_metrics import Metric
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams
from octavo.prompt_reader import Prompt
from octavo.text.tokenizer import Tokenizer


class LLMEngine:
    def __init__(self, llm: LLM):
        self.llm = llm
        self.open_requests: dict[str, PartialReply] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any, **_: Any) -> LLMEngine:
        """The other arguments name vLLM's loggers and usage reports, which do not exist here."""
        return cls(LLM.from_engine_args(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Queue a request. The time of arrival is now, whatever `arrival_time` says."""
        refuse_adapters(lora_request)
        for name, value in others.items():
            if value is not None:
                raise InvalidRequest(f"{name} is not supported: leave it out", name)
        collector = self.llm.submit(prompt, params, str(request_id), priority)
        self.open_requests[str(request_id)] = PartialReply(collector)
        return str(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the outputs of the requests that have new tokens."""
        self.llm.step()
        outputs = [
            output
            for reply in self.open_requests.values()
            if (output := reply.next_output()) is not None
        ]
        self.open_requests = {
            name: reply for name, reply in self.open_requests.items() if not reply.finished
        }
        return outputs

    def abort_request(self, request_ids: str | list[str], internal: bool = False) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if self.open_requests.pop(request_id, None) is not None:
                self.llm.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.open_requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.open_requests)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prompts. Requests that run keep their KV."""
        return self.llm.reset_prefix_cache()

    def get_tokenizer(self) -> Tokenizer:
        return self.llm.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        return self.llm.get_metrics()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self.llm.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        self.llm.stop_profile()
