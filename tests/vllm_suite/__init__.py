"""Runs vLLM's own server tests and examples against Octavo, if a clone of vLLM is at hand.

`python -m tests.vllm_suite --source CLONE` copies them into an empty folder, puts the shims of this
package beside them, and runs them. No file of vLLM is part of this project. docs/from-vllm.md says
what came out.
"""
