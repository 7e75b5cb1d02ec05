"""How well a micro-batch's matrix products fill a GPU's multiprocessors.

A product's output is computed in tiles, one to a multiprocessor at a time. The last wave of tiles takes as long as the
others, however few tiles are left for it.
"""

from __future__ import annotations

import math

from cotenant.models.lora import MODULE_GROUPS
from cotenant.models.spec import ModelSpec

# (rows, columns, rate at which a tile is computed). Smaller tiles read more for each product of two numbers.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9))
# Tiles of 128 rows run in pairs, one below the other, that share what they read: a batch of an odd number of them takes
# as long as one of the even number above. Without this, 1,920 tokens seem to suit 124 multiprocessors better than
# 1,792; measured on an H200, they are slower.
_ROWS_IN_STEP = 256


def wave_efficiency(spec: ModelSpec, num_tokens: int, num_multiprocessors: int) -> float:
    """The share of the multiprocessors' time that goes into results, over the frozen weights' products of one layer
    for ``num_tokens`` tokens, forward and the gradients of the inputs; each in the tiles that suit it best.

    It compares numbers of tokens and foretells no speeds: it leaves out that libraries may choose other tiles, and all
    that is no product.
    """
    arithmetic = spent = 0.0
    for modules in MODULE_GROUPS:
        num_out, num_in = spec.group_shape(modules)
        for num_columns, depth in ((num_out, num_in), (num_in, num_out)):
            arithmetic += num_tokens * num_columns * depth
            spent += num_multiprocessors * depth * _time(num_tokens, num_columns, num_multiprocessors)
    return arithmetic / spent


def _time(num_rows: int, num_columns: int, num_multiprocessors: int) -> float:
    """Until the last wave is over: entries of the output that a multiprocessor could compute by then, per unit of
    depth."""
    padded_rows = math.ceil(num_rows / _ROWS_IN_STEP) * _ROWS_IN_STEP
    times = []
    for rows, columns, rate in _TILES:
        num_tiles = padded_rows // rows * math.ceil(num_columns / columns)
        times.append(math.ceil(num_tiles / num_multiprocessors) * rows * columns / rate)
    return min(times)
