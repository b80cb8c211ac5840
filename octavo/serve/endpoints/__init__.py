"""What a client can call: the routes of HTTP, the WebSockets and the gRPC service.

It runs in the event loop of the front, above the connections (`octavo.serve.http`). Each endpoint
checks its request with `octavo.serve.api` and passes it on to `octavo.serve.front`.
"""
