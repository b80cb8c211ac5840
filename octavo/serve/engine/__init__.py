"""The engine process owns the scheduler, the model and the device.

The front process starts it, and communicates with it only through the messages in
`octavo.serve.channel`. No other part of the server imports torch.
"""
