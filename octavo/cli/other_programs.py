"""Names of options and commands in other programs -> what to use in Octavo.

Error messages about an unknown option or command show these hints. The flags of `vllm serve` are
not listed, because `octavo serve` accepts them (vllm_flags.py).
"""

from __future__ import annotations

CONTEXT = "Use --max-model-len N: the maximum length of prompt plus reply."
LAYERS = "Use --device cuda: it runs all layers on the GPU."
SLOTS = "Use --max-num-seqs N: the number of batch slots."
REPLY_LENGTH = "A server limits the replies by max_tokens in each request."
RANKS = "Use --tensor-parallel-size N: it divides the model between N devices."
MODEL = "Give the model as an argument, without an option."

OPTIONS = {
    # llama.cpp
    "-c": CONTEXT,
    "--ctx-size": CONTEXT,
    "-ngl": LAYERS,
    "--n-gpu-layers": LAYERS,
    "-np": SLOTS,
    "--parallel": SLOTS,
    "-n": REPLY_LENGTH,
    "--n-predict": REPLY_LENGTH,
    "-m": MODEL,
    # SGLang
    "--context-length": CONTEXT,
    "--max-running-requests": SLOTS,
    "--mem-fraction-static": "Use --gpu-memory-utilization X: the fraction of the GPU's memory.",
    "--model-path": MODEL,
    "--tp": RANKS,
    "--tp-size": RANKS,
    # fields of a request
    "--max-tokens": REPLY_LENGTH,
    "--max-new-tokens": REPLY_LENGTH,
    "--temperature": "A server takes the temperature of each request. Its default is an entry of "
    "--override-generation-config.",
}

COMMANDS = {
    # Ollama
    "run": "Use: octavo chat MODEL",
    "pull": "octavo serve NAME downloads a model of the Hugging Face hub when it needs it.",
    "list": "Models are directories and files. Use: octavo serve PATH",
    "create": "Use: octavo quantize MODEL DIRECTORY",
    # llama.cpp, SGLang, vLLM
    "generate": 'Use: octavo complete -p "TEXT"',
    "launch_server": "Use: octavo serve MODEL",
    "api_server": "Use: octavo serve MODEL",
}
