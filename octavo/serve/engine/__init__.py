"""The engine process: it owns the scheduler, the model and the device.

The front starts this process and talks to it only through the messages in
`octavo.serve.channel`. No other part of the server imports torch.
"""
