from typing import Any

from numpy.typing import NDArray

def scatter(
    gaps: list[NDArray[Any]],
    ones: list[int],
    row_class: NDArray[Any],
    column_class: NDArray[Any],
    row_size: NDArray[Any],
    column_size: NDArray[Any],
    values: list[NDArray[Any]],
    scale: NDArray[Any] | None,
    out: NDArray[Any],
) -> int: ...
def dequantize(codes: NDArray[Any], scale: NDArray[Any], out: NDArray[Any]) -> None: ...
