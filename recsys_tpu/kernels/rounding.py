"""Stochastic rounding to bfloat16 from a counter: the same (step, element) rounds the same way everywhere."""

from __future__ import annotations

from typing import Any

# Odd multipliers of a 32-bit mix (lowbias32, C. Wellons 2018), as signed int32.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)
_STEP = 0x9E3779B9 - (1 << 32)  # golden ratio: spreads consecutive steps


def noise(step: Any, element: Any) -> Any:
    """16 random bits (int32 in [0, 65536)) of an element's index and a step, both int32 (wrapping)."""
    x = element + step * _STEP
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _MULTIPLY_1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _MULTIPLY_2
    return (x ^ (x >> 16)) & 0xFFFF


def add_noise(bits: Any, random: Any, where: Any) -> Any:
    """Float32 bits whose upper 16 are the rounded bfloat16.  NaN and infinity stay what they are."""
    finite = (bits & 0x7F800000) != 0x7F800000
    return where(finite, bits + random, bits)
