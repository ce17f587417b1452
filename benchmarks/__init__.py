"""Measurements of this package beside others: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
from pathlib import Path


def figure_file(text: str) -> Path:
    """An argument of a command line: a picture to write, whose kind is its ending, in a folder that is there."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: give a file that ends in .png, .svg or .pdf, in a folder there is")
    return path
