"""Defines and updates the metrics that Prometheus reads at /metrics.

The names and labels are those of vLLM, with the prefix `octavo` or, by --metrics-prefix, `vllm`.
With `vllm`, metrics that vLLM has renamed also have their old names, which some routers read.
Three more, such as inference_requests_total, have no prefix. Times are measured with the monotonic
clock from the arrival of a request, before it is tokenised.

The counters of the engine start at zero with each engine process, which Prometheus handles. No
label contains text from a client, so the number of label values is bounded.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector as Source

from octavo.collect import Collector
from octavo.process_usage import rss_bytes
from octavo.serve.channel.messages import Heartbeat, Loaded
from octavo.types import Output

if TYPE_CHECKING:
    from octavo.serve.front.engine_client import Call, EngineClient

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
PER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
COUNTS = (1, 2, 5, 10, 20, 50, 100)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CLASSIC = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 50)

HOST_BLOCKS = {
    "ready": "KV blocks in host memory that hold reusable KV.",
    "filling": "KV blocks in host memory that a copy or a disk read is filling.",
    "free": "KV blocks in host memory that hold nothing.",
}
TIERS = {
    "stores": "KV blocks copied from the device to host memory.",
    "store_bytes": "Bytes of KV copied from the device to host memory.",
    "loads": "KV blocks copied from host memory to the device.",
    "load_bytes": "Bytes of KV copied from host memory to the device.",
    "load_seconds": "Device time spent copying KV from host memory to the device, in seconds.",
    "saves": "KV blocks written to disk.",
    "save_bytes": "Bytes of KV written to disk.",
    "fetches": "KV blocks requested from disk.",
    "fetch_bytes": "Bytes of KV requested from disk.",
    "fetch_seconds": "Time the disk took to answer KV reads, summed over blocks, in seconds.",
    "evictions": "KV blocks evicted from host memory to make room.",
    "dropped": "KV blocks evicted from the device and lost because no lower tier had room.",
    "refused": "Lookups that did not load offloaded KV because computing it seemed faster.",
}

# The names of metrics in vLLM up to version 0.11 -> the names of the same metrics today.
OLD_NAMES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}

# vLLM's names of the levels of sleep.
SLEEP_STATES = {"awake": 0, "weights_offloaded": 1, "discard_all": 2}

Values = dict[str, tuple[float, str]]  # name -> (value, help text)


class UnlockedHistogram(Source):
    """A histogram that is updated for every token.

    It has no locks. An update of the library's histogram takes ten times as long.
    """

    def __init__(
        self, name: str, help_text: str, buckets: tuple[float, ...], labels: dict[str, str]
    ):
        self.help_text = help_text
        self.labels = labels
        self.bounds = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0
        self.names = [name]  # The names under which Prometheus sees the histogram.

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def collect(self) -> Iterable[Metric]:
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for name in self.names:
            family = HistogramMetricFamily(name, self.help_text, labels=list(self.labels))
            family.add_metric(
                list(self.labels.values()),
                list(zip(bounds, accumulate(self.counts), strict=True)),
                self.sum,
            )
            yield family


class UnlockedCounter(Source):
    """A counter without locks, which is updated as often as a Tally."""

    def __init__(self, name: str, help_text: str, labels: dict[str, str]):
        self.name = name
        self.help_text = help_text
        self.labels = labels
        self.value = 0

    def inc(self, count: int = 1) -> None:
        self.value += count

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self.help_text, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), self.value)
        yield family


class EngineSource(Source):
    """Gauges and counters from the engine's latest heartbeat, computed at each scrape."""

    def __init__(self, prefix: str, model: str):
        self.prefix = prefix
        self.model = model
        self.engine_client: EngineClient | None = None

    def collect(self) -> Iterable[Metric]:
        if self.engine_client is None:
            return
        heartbeat = self.engine_client.supervisor.heartbeat
        gauges = self._gauges(self.engine_client, heartbeat)
        counters = self._work_counters(self.engine_client, heartbeat)
        counters |= self._other_counters(heartbeat)
        counters |= self._draft_counters(heartbeat)
        if heartbeat.tiers:
            gauges |= {
                f"kv_host_blocks_{state}": (heartbeat.tiers[f"host_blocks_{state}"], help_text)
                for state, help_text in HOST_BLOCKS.items()
            }
            counters |= {
                f"kv_tier_{name}": (heartbeat.tiers[name], help_text)
                for name, help_text in TIERS.items()
            }
        gauges |= self._old_names(gauges)
        counters |= self._old_names(counters)
        for name, (value, help_text) in gauges.items():
            gauge = GaugeMetricFamily(f"{self.prefix}:{name}", help_text, labels=["model_name"])
            gauge.add_metric([self.model], value)
            yield gauge
        counters |= {
            f"engine_{part}_seconds": (
                seconds,
                f"Time that the engine loop has spent in {part}, in seconds.",
            )
            for part, seconds in heartbeat.seconds.items()
        }
        for name, (value, help_text) in counters.items():
            counter = CounterMetricFamily(f"{self.prefix}:{name}", help_text, labels=["model_name"])
            counter.add_metric([self.model], value)
            yield counter
        yield self._labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their place among the drafts of a step, from 0.",
            "position",
            {str(place): count for place, count in enumerate(heartbeat.accepted_at)},
        )
        yield self._sleep_state(self.engine_client.supervisor.sleep_level)
        yield self._waiting_by_reason(self.engine_client)
        yield self._memory(heartbeat)
        if heartbeat.gpu_bytes:
            yield self._gpu_memory(heartbeat)
        if heartbeat.tiers:
            yield self._labelled(
                "kv_disk_misses",
                "KV blocks that the disk tier failed to read or write, by reason.",
                "reason",
                heartbeat.tier_misses,
            )
            hits = {tier: heartbeat.tiers[f"{tier}_tokens"] for tier in ("host", "disk")}
            yield self._labelled(
                "prefix_cache_tier_hits",
                "Prompt tokens found in a lower KV tier, by tier.",
                "tier",
                hits,
            )

    def _waiting_by_reason(self, engine_client: EngineClient) -> Metric:
        gauge = GaugeMetricFamily(
            f"{self.prefix}:num_requests_waiting_by_reason",
            "Requests in the queue, by reason: capacity if the engine is full, otherwise deferred.",
            labels=["model_name", "reason"],
        )
        waiting = len(engine_client.queue_bound.waiting)
        for reason, is_saturated in (("capacity", True), ("deferred", False)):
            count = waiting if engine_client.engine_saturated == is_saturated else 0
            gauge.add_metric([self.model, reason], count)
        return gauge

    def _memory(self, heartbeat: Heartbeat) -> Metric:
        gauge = GaugeMetricFamily(
            f"{self.prefix}:process_memory_bytes",
            "Resident memory of a process of the server, in bytes.",
            labels=["model_name", "process"],
        )
        gauge.add_metric([self.model, "front"], rss_bytes())
        gauge.add_metric([self.model, "engine"], heartbeat.rss_bytes)
        return gauge

    def _gpu_memory(self, heartbeat: Heartbeat) -> Metric:
        gauge = GaugeMetricFamily(
            f"{self.prefix}:gpu_memory_bytes",
            "GPU memory of the engine process, in bytes: allocated now, reserved, and the peak.",
            labels=["model_name", "kind"],
        )
        for kind, value in heartbeat.gpu_bytes.items():
            gauge.add_metric([self.model, kind], value)
        return gauge

    def _sleep_state(self, level: int) -> Metric:
        gauge = GaugeMetricFamily(
            f"{self.prefix}:engine_sleep_state",
            "1 for the state that the engine is in (see /sleep), and 0 for the others.",
            labels=["model_name", "sleep_state"],
        )
        for state, own_level in SLEEP_STATES.items():
            gauge.add_metric([self.model, state], float(own_level == level))
        return gauge

    def _gauges(self, engine_client: EngineClient, heartbeat: Heartbeat) -> Values:
        loaded = engine_client.supervisor.loaded
        blocks = heartbeat.blocks_used + heartbeat.blocks_cached + heartbeat.blocks_free
        return {
            "num_requests_running": (heartbeat.running, "Sequences that are running."),
            "num_requests_waiting": (
                len(engine_client.queue_bound.waiting),
                "Requests in the queue that wait for their first step.",
            ),
            "num_tokens_waiting": (
                engine_client.queue_bound.tokens,
                "Prompt tokens of the requests in the queue.",
            ),
            "num_requests_open": (
                len(engine_client.open_requests),
                "Requests that the API server has sent to the engine and that are not finished.",
            ),
            "kv_cache_usage_perc": (
                heartbeat.blocks_used / blocks if blocks else 0.0,
                "Fraction of KV blocks in use, from 0 to 1.",
            ),
            "kv_blocks_used": (
                heartbeat.blocks_used,
                "KV blocks that running sequences or reads from disk use, or that are withheld.",
            ),
            "kv_blocks_cached": (
                heartbeat.blocks_cached,
                "KV blocks that no sequence uses, with KV that a prompt can reuse. If blocks are "
                "needed, cached blocks are evicted.",
            ),
            "kv_blocks_free": (
                heartbeat.blocks_free,
                "Empty KV blocks. Sequences can take cached blocks too, so 0 is no shortage.",
            ),
            "kv_blocks_total": (
                loaded.num_blocks if loaded else 0,
                "All KV blocks on the device: used, cached and free.",
            ),
            "engine_recovery_seconds": (
                engine_client.supervisor.recovery,
                "Time from the last engine failure until the engine was ready again, in seconds.",
            ),
            "engine_ready": (
                float(engine_client.ready),
                "1 while the server accepts requests, otherwise 0.",
            ),
        }

    def _work_counters(self, engine_client: EngineClient, heartbeat: Heartbeat) -> Values:
        return {
            "prefix_cache_queries": (
                heartbeat.queried_tokens,
                "Prompt tokens looked up in the prefix cache.",
            ),
            "prefix_cache_hits": (
                heartbeat.cached_tokens,
                "Prompt tokens found in the prefix cache.",
            ),
            "num_preemptions": (heartbeat.preemptions, "Preemptions of running sequences."),
            "recomputed_tokens": (
                heartbeat.recomputed_tokens,
                "Tokens computed again after a preemption, or because the KV cache is off.",
            ),
            "engine_steps": (
                heartbeat.steps,
                "Steps that the engine has planned, including steps without work.",
            ),
            "engine_steps_shrunk": (
                heartbeat.oom_steps,
                "Steps that ran out of device memory and were retried with fewer tokens.",
            ),
            "engine_starts": (
                engine_client.supervisor.starts,
                "Engine processes started, restarts included.",
            ),
            "engine_prefill_steps": (
                heartbeat.prefill_steps,
                "Steps that computed at least one prompt token.",
            ),
            "engine_full_steps": (
                heartbeat.full_steps,
                "Steps with prompt tokens that used all of --max-num-batched-tokens.",
            ),
            "prefill_step_seconds": (
                heartbeat.prefill_seconds,
                "Time of steps with prompt tokens, in seconds.",
            ),
            "decode_step_seconds": (
                heartbeat.decode_seconds,
                "Time of steps without prompt tokens, in seconds.",
            ),
            "prefill_tokens": (heartbeat.prefill_tokens, "Tokens computed in prefill."),
            "decode_tokens": (heartbeat.decode_tokens, "Tokens computed in decode."),
        }

    def _other_counters(self, heartbeat: Heartbeat) -> Values:
        return {
            "kv_block_copies": (
                heartbeat.copies,
                "KV blocks copied before a write (copy-on-write).",
            ),
            "structured_output_compilations": (
                heartbeat.guides_compiled,
                "Structured output specifications compiled.",
            ),
            "structured_output_compile_seconds": (
                heartbeat.guide_seconds,
                "Time spent compiling structured output specifications, in seconds.",
            ),
            "structured_output_cache_hits": (
                heartbeat.guides_cached,
                "Structured output specifications found in the compilation cache.",
            ),
            "invariant_checks": (
                heartbeat.checks,
                "Consistency checks of the scheduler state (see --check-interval).",
            ),
            "invariant_failures": (
                heartbeat.check_failures,
                "Consistency checks of the scheduler state that failed; the log has the details.",
            ),
        }

    def _draft_counters(self, heartbeat: Heartbeat) -> Values:
        """Return the counters of speculative decoding. Without it, they are 0."""
        return {
            "spec_decode_num_drafts": (
                heartbeat.verifications,
                "Verifications of the drafts of one sequence in one step (see --speculative).",
            ),
            "spec_decode_num_draft_tokens": (
                heartbeat.drafted_tokens,
                "Draft tokens that the model has verified (see --speculative).",
            ),
            "spec_decode_num_accepted_tokens": (
                heartbeat.accepted_tokens,
                "Draft tokens that equal the tokens of the model (see --speculative).",
            ),
        }

    def _old_names(self, values: Values) -> Values:
        """Return the metrics that vLLM has renamed, under their old names."""
        if self.prefix != "vllm":
            return {}
        return {old: values[name] for old, name in OLD_NAMES.items() if name in values}

    def _labelled(
        self, name: str, help_text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        counter = CounterMetricFamily(
            f"{self.prefix}:{name}", help_text, labels=["model_name", label]
        )
        for key, value in values.items():
            counter.add_metric([self.model, key], value)
        return counter


class Metrics:
    """All metrics of the server.

    Metrics that are not part of EngineSource are updated while requests are processed.
    """

    def __init__(self, prefix: str, model: str):
        self.registry = CollectorRegistry()
        self.prefix = prefix
        self.model = model
        # request id -> index of the sequence -> time of its latest token
        self._last_token_times: dict[str, dict[int, float]] = {}
        self._start_times: dict[str, float] = {}
        self.source = EngineSource(prefix, model)
        self.registry.register(self.source)
        self._add_histograms()
        self._add_request_histograms()
        self._add_counters()
        self._add_server_metrics()
        self._add_classic_metrics()

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...]
    ) -> UnlockedHistogram:
        labels = {"model_name": self.model}
        histogram = UnlockedHistogram(f"{self.prefix}:{name}", help_text, buckets, labels)
        if self.prefix == "vllm":
            histogram.names += [f"vllm:{old}" for old, new in OLD_NAMES.items() if new == name]
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, help_text: str, labels: dict[str, str]) -> UnlockedCounter:
        counter = UnlockedCounter(name, help_text, labels)
        self.registry.register(counter)
        return counter

    def _add_histograms(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token, in seconds.", TTFT
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of a sequence, in seconds.",
            PER_TOKEN,
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a request after the first token, in seconds.",
            PER_TOKEN,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds",
            "Time from arrival to the last token, in seconds.",
            LATENCY,
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds",
            "Time from arrival to the first step, in seconds.",
            LATENCY,
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds",
            "Time from the first step to the first token, in seconds.",
            LATENCY,
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds",
            "Time from the first token to the last token, in seconds.",
            LATENCY,
        )
        self.iteration = self._histogram(
            "iteration_tokens_total",
            "Number of prompt tokens computed and tokens generated in a step.",
            ITERATION,
        )

    def _add_request_histograms(self) -> None:
        """Add histograms that are updated when a request finishes."""
        self.inference_time = self._histogram(
            "request_inference_time_seconds",
            "Time from the first step to the last token, in seconds.",
            LATENCY,
        )
        self.computed_lengths = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Number of prompt tokens of a finished request that were not in the prefix cache.",
            LENGTHS,
        )
        self.params_n = self._histogram(
            "request_params_n",
            "Number of completions that a finished request asked for (n).",
            COUNTS,
        )
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens",
            "Maximum number of tokens that a finished request could generate.",
            LENGTHS,
        )
        self.prompt_lengths = self._histogram(
            "request_prompt_tokens", "Number of prompt tokens of a finished request.", LENGTHS
        )
        self.reply_lengths = self._histogram(
            "request_generation_tokens",
            "Number of tokens generated for a finished sequence.",
            LENGTHS,
        )
        self.longest_replies = self._histogram(
            "request_max_num_generation_tokens",
            "Number of generated tokens of the longest sequence of a finished request.",
            LENGTHS,
        )

    def _add_counters(self) -> None:
        prefix = self.prefix
        labels = {"model_name": self.model}
        self.prompt_tokens = self._counter(
            f"{prefix}:prompt_tokens", "Prompt tokens of admitted requests.", labels
        )
        self.cached_tokens = self._counter(
            f"{prefix}:prompt_tokens_cached",
            "Prompt tokens of admitted requests found in the prefix cache.",
            labels,
        )
        self.generated = self._counter(f"{prefix}:generation_tokens", "Tokens generated.", labels)
        success = Counter(
            f"{prefix}:request_success",
            "Finished sequences by finish reason; a request has n sequences.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.success = {
            reason: success.labels(self.model, reason)
            for reason in ("stop", "length", "abort", "error")
        }

    def _add_server_metrics(self) -> None:
        prefix = self.prefix
        registry = self.registry
        self.rejections = Counter(
            f"{prefix}:rejections", "Refused requests, by reason.", ["reason"], registry=registry
        )
        self.ignored = Counter(
            f"{prefix}:ignored_params",
            "Requests that contained fields without effect.",
            registry=registry,
        )
        self.lag = Gauge(
            f"{prefix}:event_loop_lag_seconds",
            "Longest delay of the API server's event loop in the last two seconds, in seconds.",
            registry=registry,
        )
        self.streams = Gauge(
            f"{prefix}:open_streams", "Replies that are being streamed.", registry=registry
        )
        self.cache_info = Gauge(
            f"{prefix}:cache_config_info",
            "Configuration of the KV cache, in labels; the value is always 1.",
            [
                "block_size",
                "num_gpu_blocks",
                "enable_prefix_caching",
                "cache_dtype",
                "kv_cache_size_tokens",
                "kv_cache_max_concurrency",
            ],
            registry=registry,
        )

    def _add_classic_metrics(self) -> None:
        """Add three metrics that have no prefix."""
        self.classic_requests = self._counter(
            "inference_requests", "Requests that have finished.", {}
        )
        self.classic_tokens = self._counter("inference_tokens_generated", "Tokens generated.", {})
        self.classic_latency = UnlockedHistogram(
            "inference_request_latency_seconds",
            "Time from arrival to the end of the reply, in seconds.",
            CLASSIC,
            {},
        )
        self.registry.register(self.classic_latency)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    # ---- updates --------------------------------------------------------------------------------

    def loaded(self, model: Loaded | None) -> None:
        if model is not None:
            self.cache_info.clear()
            tokens = model.num_blocks * model.block_size
            self.cache_info.labels(
                block_size=model.block_size,
                num_gpu_blocks=model.num_blocks,
                enable_prefix_caching=model.prefix_caching,
                cache_dtype=model.kv_dtype,
                kv_cache_size_tokens=tokens,
                kv_cache_max_concurrency=f"{tokens / model.max_model_len:.2f}",
            ).set(1)

    def admitted(self, collector: Collector, start_time: float) -> None:
        """Record that the engine has admitted a request."""
        self._start_times[collector.request.id] = start_time
        self.queue_time.observe(max(start_time - collector.request.arrival, 0.0))
        self.prompt_tokens.inc(len(collector.request.prompt))

    def tokens(self, collector: Collector, output: Output, now: float) -> None:
        """Record an output. Call this before the collector receives the output."""
        request_id = output.request_id
        count = len(output.tokens)
        last_times = self._last_token_times.get(request_id)
        if last_times is None:
            last_times = self._last_token_times[request_id] = {}
        if not last_times and count:
            self.ttft.observe(now - collector.request.arrival)
            self.prefill_time.observe(now - self._start_times.get(request_id, now))
            self.cached_tokens.inc(output.cached_tokens)
        elif output.index in last_times:
            for _ in range(count):  # The time is divided equally among tokens of one output.
                self.itl.observe((now - last_times[output.index]) / count)
        if count:
            last_times[output.index] = now

    def generated_tokens(self, count: int) -> None:
        self.generated.inc(count)
        self.classic_tokens.inc(count)

    def ended(self, call: Call) -> None:
        """Record that a call has finished, failed or been aborted."""
        now = time.monotonic()
        # Requests that could never run are counted as rejections, not here.
        refused = (
            call.error
            and call.error.status == 400
            and not any(collector.request.id in self._start_times for collector in call.collectors)
        )
        for collector in call.collectors:
            request_id = collector.request.id
            times = collector.metrics
            self._last_token_times.pop(request_id, None)
            start_time = self._start_times.pop(request_id, None)
            if refused:
                continue
            # 499 means that the client disconnected or cancelled the request.
            reason = "error" if call.error and call.error.status != 499 else "abort"
            for completion in collector.completions:
                self.success[completion.finish_reason or reason].inc()
            if (
                collector.finished
                and times.first_token_time is not None
                and times.finished_time is not None
            ):
                generating = times.finished_time - times.first_token_time
                self.e2e.observe(times.finished_time - times.arrival_time)
                self.decode_time.observe(generating)
                if start_time is not None:
                    self.inference_time.observe(times.finished_time - start_time)
                count = self._record_lengths(collector)
                # The tokens of a beam search arrive all at once.
                if count > 1 and not collector.request.params.use_beam_search:
                    self.per_token.observe(generating / (count - 1))
        if not refused:
            self.classic_requests.inc()
            self.classic_latency.observe(now - call.arrival)

    def _record_lengths(self, collector: Collector) -> int:
        """Record the lengths of a finished request. Return the length of its longest sequence."""
        lengths = [len(completion.token_ids) for completion in collector.completions]
        for length in lengths:
            self.reply_lengths.observe(length)
        longest = max(lengths)
        prompt_length = len(collector.request.prompt)
        params = collector.request.params
        self.params_n.observe(params.n)
        self.params_max_tokens.observe(params.max_tokens or 0)
        self.computed_lengths.observe(prompt_length - collector.cached)
        self.prompt_lengths.observe(prompt_length)
        self.longest_replies.observe(longest)
        return longest
