"""Rows of a batch divided by the temperature of their requests; with vLLM itself in `tests/vllm`."""

from __future__ import annotations

import numpy as np
import torch

from node.rollout.engine._vllm_scores import row_temperatures, scaled_rows

BY_PLACE = np.array([1.0, 0.5, 2.0, 1.0], dtype=np.float32)


def test_rows_bear_the_temperature_of_their_request() -> None:
    starts = np.array([0, 2, 3, 6, 6])  # and padding after the end
    rows = row_temperatures(BY_PLACE, np.array([2, 0, 1]), starts)
    assert rows is not None
    assert rows.tolist() == [2.0, 2.0, 1.0, 0.5, 0.5, 0.5]
    assert row_temperatures(BY_PLACE, np.array([0, 3]), np.array([0, 2, 3])) is None
    assert row_temperatures(None, np.array([2]), np.array([0, 2])) is None


def test_logits_that_come_piece_by_piece_are_divided_row_by_row() -> None:
    scaled = scaled_rows(lambda hidden: 2.0 * hidden, np.array([2.0, 2.0, 1.0, 0.5], dtype=np.float32))
    pieces = [scaled(torch.ones(3, 5)), scaled(torch.ones(2, 5))]  # the last row is padding
    assert torch.cat(pieces)[:, 0].tolist() == [1.0, 1.0, 2.0, 4.0, 2.0]
