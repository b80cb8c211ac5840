"""Executes plans: batch slots and KV on the device, batch preparation, forward pass, sampling. It
knows tensors, no queues and no policy."""
