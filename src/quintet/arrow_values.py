"""Values of Arrow and Parquet files that may come from somebody else.

Arrow trusts the lengths, offsets and indices in a file. Reading a value of a damaged or hostile file reads memory
outside of it, and ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

ArrowData = TypeVar("ArrowData", bound="pa.Table | pa.RecordBatch | pa.ChunkedArray")


def checked(data: ArrowData) -> ArrowData:
    """Return a table, batch or column after checking that all of its values are in it and texts are UTF-8.

    Raises:
        pyarrow.ArrowInvalid: one is not; it is a `ValueError`.
    """
    data.validate(full=True)
    return data
