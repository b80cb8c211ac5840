"""The server: the front speaks HTTP and text, and the engine computes tokens (docs/serving.md).

    server.py     starts the front, drains it and stops it
    endpoints/    front process: the routes of HTTP, the WebSockets and the gRPC service
    http/         front process: connections, their bytes and their limits
    front/        front process: state that all connections share; starts the other processes
    workers/      worker processes: input that is large, slow or not trusted
    api/          front and workers: the rules of the API, without sockets
    engine/       engine process: the scheduler, the model and the device
    channel/      all processes: the messages between them and the sockets

A package imports only packages below it, and only `engine` imports torch (.importlinter).
"""

import os

# The C++ core of gRPC writes to stderr, and a client can cause such lines at will.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
