"""A table whose rows keep their keys: the cursor stays on its row while rows come and go around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import DataTable
from textual.widgets.data_table import RowDoesNotExist

__all__ = ["Column", "KeyedTable"]

Column = tuple[str, int]
"""Heading and width in cells."""


class KeyedTable(DataTable[Text]):
    """Redraws all rows when they changed; bounded by what a view holds. Cells are always Text, never
    markup."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False, id="table.down"),
        Binding("k", "cursor_up", "Up", show=False, id="table.up"),
        Binding("g", "scroll_top", "Top", show=False, id="table.top"),
        Binding("G", "scroll_bottom", "Bottom", show=False, id="table.bottom"),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(
            id=id,
            cursor_type="row",
            zebra_stripes=True,
            cell_padding=0,
            cursor_foreground_priority="renderable",
        )
        self._columns: tuple[Column, ...] = ()

    def columns_for(self, cells: int) -> tuple[Column, ...]:
        """Headings and widths that use `cells` cells, counting one of space after each column."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw the rows again; called when the width changed."""
        raise NotImplementedError

    @property
    def cells(self) -> int:
        """Cells for columns, one of space after each; a scrollbar may take the last."""
        return self.content_size.width - 1

    @property
    def selected_key(self) -> str | None:
        """Key of the row under the cursor."""
        if not self.is_valid_row_index(self.cursor_row):
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def set_rows(
        self, rows: Sequence[tuple[str, tuple[str | Text, ...]]], *, follow_top: bool = False
    ) -> None:
        """Show `rows` (key, cells). The cursor stays on its key; with `follow_top` it stays on the first row
        when it was there, so that a list with the newest on top keeps showing the newest."""
        columns = self.columns_for(self.cells)
        if columns != self._columns:
            self._columns = columns
            self.clear(columns=True)
            for heading, width in columns:
                self.add_column(Text(heading), width=width + 1)
        selected, row_before, scroll_y = self.selected_key, self.cursor_row, self.scroll_y
        stay_on_top = follow_top and row_before <= 0
        self.clear()
        for key, cells in rows:
            self.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells), key=key)
        if not rows or selected is None or stay_on_top:
            return
        try:
            row = self.get_row_index(selected)
        except RowDoesNotExist:
            row = min(row_before, len(rows) - 1)
        self.move_cursor(row=row, animate=False, scroll=False)
        self.scroll_to(y=scroll_y + row - row_before, animate=False, immediate=True)

    def on_resize(self, event: Resize) -> None:
        if self.columns_for(self.cells) != self._columns:
            self.redraw()
