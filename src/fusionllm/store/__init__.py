"""What lies on a disk: the data a run reads, the checkpoints it writes, the folder of its results.

No torch, no clock, no sockets. On the path, aside: files -> **batches**; tensors as bytes -> **checkpoint**.
"""
