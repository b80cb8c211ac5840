"""The endpoints that a client can call: HTTP routes, WebSockets and the gRPC service.

They run in the event loop of the API server, on top of the connections (`octavo.serve.http`). Each
endpoint checks its request with `octavo.serve.api` and passes it on to `octavo.serve.front`.
"""
