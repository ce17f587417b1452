"""``python -m fusionllm`` is the command ``fusionllm``."""

from fusionllm.cli.main import main

main()
