"""vLLM's engine options that Octavo does not have, with vLLM's defaults. Data only.

LLM, EngineArgs and `octavo serve` accept every one of them at its default, so that a script or a
command line for vLLM needs no change. NO_EFFECT lists options whose other values also change
nothing here. The groups of REFUSED name options whose other values would ask for something that
Octavo does not do, and what to do instead. SERVER_NO_EFFECT and SERVER_REFUSED are
options of `vllm serve` alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.errors import InvalidRequest

# Any value is accepted: the option tunes something that Octavo decides itself or does not have.
NO_EFFECT: dict[str, Any] = {
    "trust_remote_code": False,  # Code that comes with a model never runs.
    "tokenizer_mode": "auto",
    "config_format": "auto",
    "hf_token": None,  # huggingface_hub reads HF_TOKEN.
    "code_revision": None,
    "safetensors_load_strategy": None,
    "safetensors_prefetch_num_threads": 8,
    "safetensors_prefetch_block_size": 16777216,
    "max_parallel_loading_workers": None,
    "model_loader_extra_config": {},
    "ignore_patterns": ["original/**/*"],
    "use_tqdm_on_load": True,
    "pt_load_map_location": "cpu",
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "max_num_scheduled_tokens": None,
    "scheduler_reserve_full_isl": True,
    "prefill_schedule_interval": 1,
    "watermark": 0.0,
    "async_scheduling": None,
    "stream_interval": 1,
    "disable_hybrid_kv_cache_manager": None,
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": None,
    "prefix_match_unit": None,
    "kv_sharing_fast_prefill": False,
    "enable_cumem_allocator": False,
    "compilation_config": None,
    "optimization_level": 2,
    "performance_mode": "balanced",
    "cudagraph_capture_sizes": None,
    "cuda_graph_sizes": [],
    "max_cudagraph_capture_size": None,
    "max_seq_len_to_capture": 8192,
    "attention_config": None,
    "kernel_config": None,
    "linear_backend": "auto",
    "ir_op_priority": None,
    "enable_flashinfer_autotune": None,
    "use_fp64_gumbel": False,
    "model_impl": "auto",
    "structured_outputs_config": None,
    "guided_decoding_backend": "auto",
    "disable_custom_all_reduce": False,
    "distributed_timeout_seconds": None,
    "cpu_distributed_timeout_seconds": None,
    "numa_bind": False,
    "numa_bind_nodes": None,
    "numa_bind_cpus": None,
    "ray_workers_use_nsight": False,
    "renderer_num_workers": 1,
    "max_logprobs": 20,
    "disable_log_stats": False,
    "disable_log_requests": False,
    "enable_log_requests": False,
    "aggregate_engine_logging": False,
    "show_hidden_metrics_for_version": None,
    "collect_detailed_traces": None,
    "per_request_spec_decode_metrics": "none",
    "kv_cache_metrics": False,
    "kv_cache_metrics_sample": 0.01,
    "cudagraph_metrics": False,
    "enable_layerwise_nvtx_tracing": False,
    "enable_mfu_metrics": False,
    "enable_logging_iteration_details": False,
    "enable_mm_processor_stats": False,
    "jit_monitor_mode": "warn",
    "jit_monitor_verbose": False,
    "fail_on_environ_validation": False,
    "allow_deprecated_quantization": False,
    "shutdown_timeout": 0,
    "use_v2_block_manager": True,
    "disable_async_output_proc": False,
    "num_lookahead_slots": 0,
    "limit_mm_per_prompt": {},  # Images are refused, however many there are.
    "enable_sleep_mode": False,  # A server can always sleep, and LLM has no sleep().
    "enable_trace_replay": False,  # Octavo replays tokens without it.
    "additional_config": {},
}


class OtherName(NamedTuple):
    """A switch that Octavo has under another name."""

    default: bool  # vLLM's default, which asks for nothing
    option: str  # the option of Octavo's that the other value turns on


OTHER_NAMES = {"disable_cascade_attn": OtherName(default=True, option="cascade_attention")}


class RefusedOptions(NamedTuple):
    """Options that are accepted only at vLLM's default."""

    advice: str  # It completes the sentence "NAME=VALUE is not supported: ...".
    defaults: dict[str, Any]


REFUSED = (
    RefusedOptions(
        "an adapter must be merged into the model's weights first",
        {
            "enable_lora": False,
            "enable_lora_bias": False,
            "max_loras": 1,
            "max_lora_rank": 16,
            "max_cpu_loras": None,
            "lora_dtype": "auto",
            "lora_target_modules": None,
            "lora_modules": None,
            "fully_sharded_loras": False,
            "default_mm_loras": None,
            "enable_tower_connector_lora": False,
            "specialize_active_lora": False,
            "enable_mixed_moe_lora_format": False,
            "enable_moe_shared_loras": False,
        },
    ),
    RefusedOptions(
        "Octavo runs text models only",
        {
            "disable_chunked_mm_input": False,
            "allowed_local_media_path": "",
            "allowed_media_domains": None,
            "language_model_only": False,
            "enable_mm_embeds": False,
            "interleave_mm_strings": False,
            "media_io_kwargs": {},
            "mm_processor_kwargs": None,
            "mm_processor_cache_gb": 4,
            "mm_processor_cache_type": "lru",
            "mm_processor_device": "auto",
            "mm_hasher_algorithm": None,
            "mm_shm_cache_max_object_size_mb": 128,
            "mm_encoder_only": False,
            "mm_encoder_tp_mode": "weights",
            "mm_encoder_attn_backend": None,
            "mm_encoder_attn_dtype": None,
            "mm_encoder_fp8_scale_path": None,
            "mm_encoder_fp8_scale_save_path": None,
            "mm_encoder_fp8_scale_save_margin": 1.5,
            "mm_tensor_ipc": "direct_rpc",
            "mm_ipc_gpu_memory_gb": 0,
            "mm_device_do_normalize": True,
            "skip_mm_profiling": False,
            "video_pruning_rate": None,
            "video_pruning_method": "evs",
            "io_processor_plugin": None,
        },
    ),
    RefusedOptions(
        "Octavo generates text and computes embeddings, always both",
        {"task": "auto", "runner": "auto", "convert": "auto"},
    ),
    RefusedOptions("give it as pooler_config", {"override_pooler_config": None}),
    RefusedOptions("prompts are text or token ids", {"enable_prompt_embeds": False}),
    RefusedOptions("Octavo has no diffusion models", {"diffusion_config": None}),
    RefusedOptions(
        "an engine divides its model with tensor_parallel_size alone. Start several servers "
        "behind octavo route for more",
        {
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "data_parallel_rank": None,
            "data_parallel_start_rank": None,
            "data_parallel_size_local": None,
            "data_parallel_address": None,
            "data_parallel_rpc_port": None,
            "data_parallel_hybrid_lb": False,
            "data_parallel_external_lb": False,
            "data_parallel_multi_port_external_lb": False,
            "data_parallel_backend": "mp",
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "dcp_comm_backend": None,
            "dcp_q_replicate": None,
            "dcp_kv_cache_interleave_size": 1,
            "cp_kv_cache_interleave_size": 1,
            "disable_nccl_for_dp_synchronization": None,
            "distributed_executor_backend": None,
            "master_addr": "127.0.0.1",
            "master_port": 29501,
            "nnodes": 1,
            "node_rank": 0,
            "worker_cls": "auto",
            "worker_extension_cls": "",
            "fault_tolerance_config": None,
            "enable_fault_tolerance": False,
        },
    ),
    RefusedOptions(
        "Octavo has no mixture-of-experts or state-space models yet",
        {
            "enable_expert_parallel": False,
            "enable_ep_weight_filter": False,
            "moe_backend": "auto",
            "all2all_backend": "allgather_reducescatter",
            "enable_elastic_ep": False,
            "enable_dbo": False,
            "ubatch_size": 0,
            "dbo_decode_token_threshold": 32,
            "dbo_prefill_token_threshold": 512,
            "eplb_config": None,
            "enable_eplb": False,
            "expert_placement_strategy": "linear",
            "enable_return_routed_experts": False,
            "enable_bf16x3_router_gemm": None,
            "mamba_config": None,
            "mamba_cache_dtype": "auto",
            "mamba_ssm_cache_dtype": "auto",
            "mamba_block_size": None,
            "mamba_cache_mode": "none",
            "mamba_backend": "triton",
            "mamba_ssu_algorithm": None,
            "enable_mamba_cache_stochastic_rounding": False,
            "mamba_cache_philox_rounds": 0,
            "replayssm_buffer_len": 16,
            "use_replayssm": False,
            "gdn_prefill_backend": None,
            "kda_prefill_backend": None,
        },
    ),
    RefusedOptions(
        "weights stay on the device. Make them smaller with quantization (--quant)",
        {
            "cpu_offload_gb": 0,
            "cpu_offload_params": set(),
            "offload_backend": "auto",
            "offload_group_size": 0,
            "offload_num_in_group": 1,
            "offload_prefetch_step": 1,
            "offload_params": set(),
            "weight_transfer_config": None,
        },
    ),
    RefusedOptions(
        "keep KV in host memory with swap_space (--kv-host-gib) and on disk with kv_disk_path "
        "(--kv-disk)",
        {
            "kv_offloading_size": None,
            "kv_offloading_backend": "native",
            "kv_transfer_config": None,
            "ec_transfer_config": None,
            "ec_manager_config": None,
        },
    ),
    RefusedOptions(
        "bound the KV cache with gpu_memory_utilization or num_gpu_blocks_override (--num-blocks)",
        {"kv_cache_memory_bytes": None},
    ),
    RefusedOptions(
        "the whole KV cache has the type kv_cache_dtype",
        {"kv_cache_dtype_skip_layers": [], "calculate_kv_scales": False},
    ),
    RefusedOptions(
        "use speculative_config (--speculative)",
        {"spec_method": None, "spec_model": None, "spec_tokens": None},
    ),
    RefusedOptions(
        "give the weight format with quantization (--quant)", {"quantization_config": None}
    ),
    RefusedOptions(
        "give the whole model as a directory, a .gguf file or a name on the hub",
        {
            "model_weights": "",
            "hf_config_path": None,
            "model_class_overrides": {},
            "tokenizer_revision": None,
        },
    ),
    RefusedOptions("set HF_HOME to another directory for downloads", {"download_dir": None}),
    RefusedOptions("choose a GPU with CUDA_VISIBLE_DEVICES", {"device_ids": None}),
    RefusedOptions(
        "a model's sliding window is part of the model", {"disable_sliding_window": False}
    ),
    RefusedOptions(
        "logprobs are the model's own, before temperature and masks",
        {"logprobs_mode": "raw_logprobs", "return_sampling_mask": False},
    ),
    RefusedOptions(
        "write a policy of your own (docs/scheduling.md) and name it in scheduling_policy",
        {"scheduler_cls": None},
    ),
    RefusedOptions(
        "listen to the engine's events (docs/events.md)",
        {"kv_events_config": None, "otlp_traces_endpoint": None},
    ),
    RefusedOptions(
        "only `octavo serve` separates reasoning from the reply", {"reasoning_parser": ""}
    ),
    RefusedOptions(
        "Octavo reads the styles of reasoning that docs/serving.md lists",
        {"reasoning_parser_plugin": None, "reasoning_config": None},
    ),
    RefusedOptions("pass the template to LLM.chat", {"chat_template": None}),
    RefusedOptions("use skip_tokenizer_init", {"tokens_only": False}),
    RefusedOptions("only `octavo serve` has a name for clients", {"served_model_name": None}),
)

SERVER_NO_EFFECT: dict[str, Any] = {
    "enable_auto_tool_choice": False,  # Tools are always enabled.
    "exclude_tools_when_tool_choice_none": False,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "chat_template_content_format": "auto",
    "uvicorn_log_level": "info",
    "disable_uvicorn_access_log": False,
    "disable_access_log_for_endpoints": None,
    "log_config_file": None,
    "max_log_len": None,
    "log_error_stack": False,
    "disable_frontend_multiprocessing": False,
    "enable_prompt_tokens_details": False,
    "enable_server_load_tracking": False,
    "enable_per_request_metrics": False,
    "enable_tokenizer_info_endpoint": False,
    "enable_request_id_headers": False,
    "disable_fastapi_docs": False,
    "enable_offline_docs": False,
    "h11_max_incomplete_event_size": None,
    "h11_max_header_count": None,
    "fingerprint_mode": "full",
    "fingerprint_value": None,
    "allow_credentials": False,
    "allowed_methods": ["*"],
    "allowed_headers": ["*"],
    "api_server_count": None,
}
SERVER_REFUSED = (
    RefusedOptions("add --allowed-origin URL for each origin", {"allowed_origins": ["*"]}),
    RefusedOptions("restart the server to read a new certificate", {"enable_ssl_refresh": False}),
    RefusedOptions("put a proxy with such middleware before the server", {"middleware": []}),
    RefusedOptions("replies of the model have the role assistant", {"response_role": "assistant"}),
    RefusedOptions("give --tool-parser package.module:NAME", {"tool_parser_plugin": ""}),
    RefusedOptions("the client runs tools", {"tool_server": None}),
    RefusedOptions("messages are never logged", {"enable_log_outputs": False}),
    RefusedOptions("every server has an engine of its own", {"headless": False}),
    RefusedOptions("write the options on the command line", {"config": None}),
)


def advice_of(groups: tuple[RefusedOptions, ...]) -> dict[str, str]:
    return {name: group.advice for group in groups for name in group.defaults}


def defaults_of(groups: tuple[RefusedOptions, ...]) -> dict[str, Any]:
    return {name: default for group in groups for name, default in group.defaults.items()}


ADVICE = advice_of(REFUSED)
DEFAULTS: dict[str, Any] = (
    NO_EFFECT | {name: other.default for name, other in OTHER_NAMES.items()} | defaults_of(REFUSED)
)
SERVER_ADVICE = ADVICE | advice_of(SERVER_REFUSED)
SERVER_DEFAULTS = DEFAULTS | SERVER_NO_EFFECT | defaults_of(SERVER_REFUSED)
# Other values that ask for nothing more than the default.
ALSO_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "task": ("generate", "embed", "embedding"),
    "runner": ("generate", "pooling"),
    "convert": ("none", "embed"),
    "distributed_executor_backend": ("mp", "uni"),
    # The marks of the styles qwen3 and deepseek_r1. A style of --reasoning-parser has its marks.
    "reasoning_config": ({"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},),
}


def turns_on(name: str, value: Any) -> bool:
    """Return whether a value of a vLLM option turns on an option of OTHER_NAMES. None does not."""
    return name in OTHER_NAMES and value is not None and value != OTHER_NAMES[name].default


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a value of a vLLM option asks for nothing that Octavo would do otherwise.

    An empty value, such as None or {}, asks for nothing."""
    if name not in SERVER_ADVICE or not value:
        return True
    return value == SERVER_DEFAULTS[name] or value in ALSO_NEUTRAL.get(name, ())


def check_vllm_option(name: str, value: Any) -> None:
    """Raise InvalidRequest unless this value of a vLLM option has no effect here."""
    if not is_neutral(name, value):
        raise InvalidRequest(f"{name}={value!r:.60} is not supported: {SERVER_ADVICE[name]}", name)
