"""Comparison of outputs: recorded and replayed messages in, counts and the first difference by field out. Pure.

`counts` finds the recorded output of each replayed one by its identity and counts equal and different pairs, `fields`
lists the fields of a pair. What counts as the same decision or the same number is defined in `fields` only.
"""

from .counts import Difference, OutputCounts
from .fields import FieldPair

__all__ = ["Difference", "FieldPair", "OutputCounts"]
