"""The server: two processes, the front that speaks HTTP and text and the engine that computes tokens (docs/serving.md).

The front imports no torch. Read in this order: messages, engine_process, supervisor, client; then protocol, validate,
completions; then http and what stands around it.
"""

import os

# its C++ core writes lines of its own to stderr, some whenever a client likes
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
