"""Executes plans: rows and KV on the device, batch preparation, forward, sampling. Knows tensors, no queues, no policy."""
