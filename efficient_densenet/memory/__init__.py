"""Measuring, predicting and budgeting the memory of a training step."""

from .budget import BudgetPlan, largest_batch, set_memory_budget
from .card import CardFit, what_fits
from .peaks import Peaks, high_water_mark, measure, saved_bytes, tensor_peak
from .predict import MemoryEstimate, predict

__all__ = [
    "BudgetPlan",
    "CardFit",
    "MemoryEstimate",
    "Peaks",
    "high_water_mark",
    "largest_batch",
    "measure",
    "predict",
    "saved_bytes",
    "set_memory_budget",
    "tensor_peak",
    "what_fits",
]
