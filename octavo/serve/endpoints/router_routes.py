"""The routes that routers call: what the server is, how loaded it is, and an empty prefix cache.

SGLang's router reads `/server_info`, `/model_info` and `/get_load`, and older versions of it add
`get_` to the first two. vLLM's router passes all of them on to a worker. docs/routing.md describes
the contracts.
"""

from __future__ import annotations

import platform
from typing import Any

from octavo import __version__
from octavo.serve.api.protocol import GenerateRequest
from octavo.serve.channel.messages import ClearCache
from octavo.serve.endpoints.operator_routes import check_operator
from octavo.serve.endpoints.routes import generate_texts, prepare_generate
from octavo.serve.http.exchange import Exchange


async def server_info(exchange: Exchange) -> None:
    """Reply with the configuration of the engine, under the names of SGLang."""
    config = exchange.front.config
    loaded = exchange.front.engine_client.model
    info: dict[str, Any] = {
        "model_path": config.name,
        "served_model_name": config.name,
        "version": __version__,
        "tp_size": config.engine.tensor_parallel_size,
        "dp_size": 1,
        "disaggregation_mode": "null",
        "dtype": loaded.dtype,
        "kv_cache_dtype": loaded.kv_dtype,
        "device": loaded.device,
        "max_model_len": loaded.max_model_len,
        "context_length": loaded.max_model_len,
        "max_total_tokens": loaded.num_blocks * loaded.block_size,
        "max_prefill_tokens": loaded.max_batched_tokens,
        "max_running_requests": loaded.max_num_seqs,
        "page_size": loaded.block_size,
        "enable_prefix_caching": loaded.prefix_caching,
        # vLLM's clients find the whole configuration under this name.
        "vllm_config": {
            "model": config.name,
            "dtype": loaded.dtype,
            "max_model_len": loaded.max_model_len,
            "max_num_seqs": loaded.max_num_seqs,
            "max_num_batched_tokens": loaded.max_batched_tokens,
            "block_size": loaded.block_size,
            "num_gpu_blocks": loaded.num_blocks,
            "tensor_parallel_size": config.engine.tensor_parallel_size,
        },
        "vllm_env": {},
        "system_env": {"device": loaded.device, "python": platform.python_version()},
    }
    await exchange.reply(info)


async def model_info(exchange: Exchange) -> None:
    config = exchange.front.config
    loaded = exchange.front.engine_client.model
    await exchange.reply(
        {
            "model_path": config.name,
            "served_model_name": config.name,
            "is_generation": True,
            "architectures": [loaded.architecture],
            "max_model_len": loaded.max_model_len,
        }
    )


async def load(exchange: Exchange) -> None:
    """Reply with the requests and the tokens of the engine, one entry as for one SGLang rank."""
    engine_client = exchange.front.engine_client
    heartbeat = engine_client.supervisor.heartbeat
    queue_bound = engine_client.queue_bound
    num_waiting = len(queue_bound.waiting)
    num_tokens = heartbeat.blocks_used * engine_client.model.block_size + queue_bound.tokens
    entry = {
        "dp_rank": 0,
        "num_reqs": heartbeat.running + num_waiting,
        "num_waiting_reqs": num_waiting,
        "num_tokens": num_tokens,
    }
    await exchange.reply([entry])


async def health_generate(exchange: Exchange) -> None:
    """Reply with status 200 after the engine has generated one token."""
    front = exchange.front
    front.check_may_send(exchange.caller)
    body = GenerateRequest(prompt="1", max_new_tokens=1)
    prepared = await prepare_generate(front, exchange.caller, body, ["1"], headers={})
    await generate_texts(exchange, prepared)
    await exchange.reply(front.engine_client.state())


async def flush_cache(exchange: Exchange) -> None:
    """Empty the prefix cache. If there are API keys, only administrators may do this."""
    check_operator(exchange)
    front = exchange.front
    _ = front.engine_client.model  # This raises an error while no engine is ready.
    front.engine_client.supervisor.send(ClearCache())
    await exchange.reply({"flushed": True, "success": True})
