"""vLLM's other classes and module names, on top of LLM. docs/from-vllm.md says what they do here.

vllm_modules.py     vLLM's module names, such as octavo.engine.arg_utils, and what they contain
engine_args.py      EngineArgs, AsyncEngineArgs and the parser of a script's command line
llm_engine.py       LLMEngine: requests with ids, and one step at a time
async_llm.py        AsyncLLM: replies as asynchronous generators
partial_outputs.py  what both return before a reply is complete
prompts.py          the types of prompts
http_server.py      helpers for scripts that have an HTTP server of their own
environment.py      small functions that scripts import from vLLM
"""
