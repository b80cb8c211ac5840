"""The rules of the API: the fields of requests, validation, prompts, replies and errors.

This package runs in the front and in the worker processes. It has no sockets, and it does not know
whether a request arrived over HTTP, a WebSocket or gRPC.
"""
