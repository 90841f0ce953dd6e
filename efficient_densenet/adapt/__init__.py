"""DenseNets of other libraries, in place: `make_efficient(model)` runs every dense block in a model by our engines.

A dense block is recognized by its structure and verified by a trace: its own forward must compute the same
expressions as its parts. The model stays the same object, with the same parameters, names and hooks; the class of a
converted module becomes a subclass of the same name. `restore(model)` undoes the conversion.
"""

from ..engine.parts import BlockParts, LayerParts, register_block
from .convert import conversion_report, make_efficient, restore
from .report import Changed, Report

__all__ = [
    "BlockParts",
    "Changed",
    "LayerParts",
    "Report",
    "conversion_report",
    "make_efficient",
    "register_block",
    "restore",
]
