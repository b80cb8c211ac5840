"""The rules of the API: the fields of requests, validation, prompts, replies and errors.

This package runs in the front process and in the worker processes. It uses no sockets, and it does
not depend on the transport of a request, which can be HTTP, a WebSocket or gRPC.
"""
