"""Measurements of this package beside others: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def figure_file(text: str) -> Path:
    """An argument of a command line: a picture to write, whose kind is its ending, in a folder that is there."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: give a file that ends in .png, .svg or .pdf, in a folder there is")
    return path


def at_least(low: int) -> Callable[[str], int]:
    """An option's type: whole numbers from ``low`` on."""

    def number(text: str) -> int:
        if (value := int(text)) < low:
            raise argparse.ArgumentTypeError(f"{value} is too small; {low} or more")
        return value

    return number


def above_zero(text: str) -> float:
    """An option's type: a finite number above zero."""
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is no number above zero")
    return value
