"""Tables from rows and from dataframes."""

import numpy as np
import pytest
import torch

from accel_train import OptionError
from accel_train.tracking.tables import read_table

ROWS = [["cat", 0.5], ["dog", 0.25]]


@pytest.mark.parametrize(
    ("columns", "data"),
    [
        (["label", "score"], ROWS),
        (None, [["label", "score"], *ROWS]),
        (("label", "score"), (("cat", torch.tensor(0.5)), ("dog", np.float64(0.25)))),
    ],
)
def test_rows(columns, data):
    table = read_table(columns, data, None)
    assert (table.columns, table.rows) == (["label", "score"], ROWS)
    assert table.by_column() == {"label": ["cat", "dog"], "score": [0.5, 0.25]}
    assert {type(row[1]) for row in table.rows} == {float}


def test_a_dataframe():
    class Frame:
        """What pandas has of one; the real one is used with the real trackers."""

        columns = ("label", "score")

        def to_numpy(self):
            return np.array(ROWS, dtype=object)

    table = read_table(None, None, Frame())
    assert (table.columns, table.rows) == (["label", "score"], ROWS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], None, None), "got no rows"),
        ((None, [], None), "neither columns nor a first row"),
        ((["a"], [[1]], object()), "a dataframe and also columns"),
        ((["a", "b"], [[1, 2], [3]], None), r"got 1 cells in row 1, and 2 columns: \['a', 'b'\]"),
    ],
)
def test_what_is_no_table(arguments, message):
    with pytest.raises(OptionError, match=message):
        read_table(*arguments)


def test_a_table_without_rows():
    assert read_table(["a"], [], None).rows == []
