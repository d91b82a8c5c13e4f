"""A table of a training loop, read from columns and rows or from a dataframe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel_train.errors import OptionError
from accel_train.tracking.values import plain

__all__ = ["LoggedTable", "read_table"]


@dataclass(frozen=True)
class LoggedTable:
    """Columns and rows; cells that were tensors or NumPy values of one element are Python numbers.

    Attributes:
        columns: names.
        rows: one list per row, as long as `columns`.
    """

    columns: list[str]
    rows: list[list[Any]]

    def by_column(self) -> dict[str, list[Any]]:
        """Name of a column to its cells."""
        return {name: [row[place] for row in self.rows] for place, name in enumerate(self.columns)}


def read_table(
    columns: Sequence[str] | None, data: Sequence[Sequence[Any]] | None, dataframe: Any | None
) -> LoggedTable:
    """Read a table from a dataframe, or from rows and the names of their columns.

    Args:
        columns: names of columns; None with `data`: the first row holds them.
        data: the rows.
        dataframe: a pandas dataframe, instead of both.

    Raises:
        OptionError: both kinds or neither are given, or a row has another length than `columns`.
    """
    if dataframe is not None:
        if columns is not None or data is not None:
            raise OptionError("log_table() got a dataframe and also columns or data. Pass one of the two.")
        columns, data = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
    if data is None:
        raise OptionError("log_table() got no rows. Pass dataframe=…, or columns=… and data=….")
    rows = [list(row) for row in data]
    if columns is None:
        if not rows:
            raise OptionError("log_table() got neither columns nor a first row that holds their names.")
        columns, rows = [str(name) for name in rows[0]], rows[1:]
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise OptionError(
                f"log_table() got {len(row)} cells in row {number}, and {len(columns)} columns: {list(columns)}."
            )
    cells = plain(
        {str(place): {str(i): cell for i, cell in enumerate(row)} for place, row in enumerate(rows)}
    )
    return LoggedTable([str(name) for name in columns], [list(row.values()) for row in cells.values()])
