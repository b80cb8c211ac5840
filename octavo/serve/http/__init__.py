"""The connections of HTTP and WebSocket clients.

This package accepts connections, limits their number, time and memory, and turns bytes into
requests and messages, and replies into bytes. It runs in the event loop of the API server, except
for the separate health port, which runs in threads.
"""
