"""A wide-area network on one machine: network namespaces with links of given rate and delay between them.

For measurements and tests; nothing of the product needs it. Needs root and Linux, see `why_unavailable`.
"""

from fusionllm.testbed.bed import Testbed, why_unavailable
from fusionllm.testbed.pipe import PipeSpec, PipeStats
from fusionllm.testbed.scenario import Scenario, build_scenario, load_scenario

__all__ = ["PipeSpec", "PipeStats", "Scenario", "Testbed", "build_scenario", "load_scenario", "why_unavailable"]
