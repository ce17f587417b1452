"""A node: lends its compute. Executes listed operators on tensors and nothing else; knows no model code.

`agent` owns the event loop and the sockets; `worker` is the one thread that touches tensors.
"""
