"""The server: the front process handles HTTP and text, and the engine process computes tokens.

    server.py     starts the front process, drains it and stops it
    endpoints/    front process: HTTP routes, WebSockets and the gRPC service
    http/         front process: connections, their bytes and their limits
    front/        front process: state that all connections share; starts the other processes
    workers/      worker processes: input that is large, slow to process or not trusted
    api/          front and workers: the rules of the API, without sockets
    engine/       engine process: the scheduler, the model and the device
    channel/      all processes: the messages between them and the sockets

A package imports only packages below it, and only `engine` imports torch (.importlinter). The page
docs/serving.md describes the server.
"""

import os

# The C++ core of gRPC writes to stderr, and clients could fill the log with such lines.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
