"""Layouts as arrays: what a layout says of each token of a stream. Pure: knows neither pages nor the tree."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from akv_server.ops import VISIBLE, Layout

Array = np.ndarray


def shifts(layout: Layout, start: int, end: int) -> Array:
    """int32 [end - start]: how far each token sits from its index."""
    return _spread(layout, start, end, "shift")


def states(layout: Layout, num_tokens: int) -> Array:
    """int32 [num_tokens]: VISIBLE, DROPPED or FORGOTTEN, as a layout has it, those not computed yet included."""
    return _spread(layout, 0, num_tokens, "state")


def visible_mask(layout: Layout, num_tokens: int) -> Array:
    """bool [num_tokens]: which tokens a layout sees, those that it has not computed yet included."""
    mask: Array = states(layout, num_tokens) == VISIBLE
    return mask


def _spread(layout: Layout, start: int, end: int, name: str) -> Array:
    """int32 [end - start]: what the run of each token says; in a few passes over the runs, of which there may be
    thousands."""
    runs = layout.runs_in(start, end)
    cuts = np.fromiter(map(attrgetter("start"), runs), np.int64, len(runs))
    cuts[:1] = start
    values = np.fromiter(map(attrgetter(name), runs), np.int32, len(runs))
    spread: Array = np.repeat(values, np.diff(cuts, append=end))
    return spread
