"""The broker: knows machines and jobs, admits, plans, watches. Needs no tensor framework.

`server` is the shell around `protocol.membership` and `protocol.job`; `planning` turns a graph and nodes into stages.
"""

from fusionllm.broker.server import Broker

__all__ = ["Broker"]
