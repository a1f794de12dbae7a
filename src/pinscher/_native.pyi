from typing import Any

from numpy.typing import NDArray

def scatter(
    gaps: NDArray[Any],
    ones: NDArray[Any],
    row_class: NDArray[Any],
    column_class: NDArray[Any],
    row_size: NDArray[Any],
    column_size: NDArray[Any],
    values: NDArray[Any],
    counts: NDArray[Any],
    out: NDArray[Any],
) -> int: ...
def dequantize(codes: NDArray[Any], scale: NDArray[Any], out: NDArray[Any]) -> None: ...
