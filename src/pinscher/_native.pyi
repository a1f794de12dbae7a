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
def isas(all: bool = False) -> list[str]: ...
def break_even(isa: str) -> dict[str, float]: ...
def bracket(
    pool: Pool, isa: str, scores: NDArray[Any], low: float, high: float, room: int
) -> tuple[int, NDArray[Any]] | None: ...
def observe(
    pool: Pool, isa: str, weight: NDArray[Any], grad: NDArray[Any], lr: float, steps: bool, sum: NDArray[Any]
) -> int: ...
def fold(
    pool: Pool,
    isa: str,
    weight: NDArray[Any],
    grad: NDArray[Any],
    lr: float,
    steps: bool,
    sum: NDArray[Any],
    mean: NDArray[Any],
    spread: NDArray[Any],
    length: float,
    mean_share: float,
    spread_share: float,
) -> int: ...
def activate(isa: str, name: str, values: NDArray[Any]) -> None: ...

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Matrix:
    @staticmethod
    def from_f32(weights: NDArray[Any], sparse: bool) -> Matrix: ...
    @staticmethod
    def from_i8(codes: NDArray[Any], scale: NDArray[Any]) -> Matrix: ...
    rows: int
    columns: int
    nonzeros: int
    bytes: int
    work: int
    kind: str
    def multiply(
        self, pool: Pool, isa: str, x: NDArray[Any], bias: NDArray[Any] | None, then: str, out: NDArray[Any]
    ) -> None: ...

class Layer:
    def __init__(
        self,
        matrices: list[Matrix],
        biases: list[NDArray[Any] | None],
        norms: list[NDArray[Any]],
        epsilon: float,
    ) -> None: ...

class Encoder:
    def __init__(self, width: int, heads: int, activation: str, layers: list[Layer]) -> None: ...
    def set_relative(self, table: NDArray[Any]) -> None: ...
    def set_embeddings(
        self,
        tables: list[NDArray[Any]],
        weight: NDArray[Any],
        bias: NDArray[Any],
        epsilon: float,
        projection: Matrix | None = ...,
        projection_bias: NDArray[Any] | None = ...,
    ) -> None: ...
    def run(
        self,
        pool: Pool,
        isa: str,
        hidden: NDArray[Any] | None,
        indices: list[NDArray[Any]],
        lengths: list[int],
        out: NDArray[Any],
        every: NDArray[Any] | None,
        first: bool,
        hides: list[int] = ...,
        tail: Tail | None = ...,
    ) -> None: ...

class Tail:
    def __init__(
        self,
        width: int,
        pooling: str,
        matrices: list[Matrix],
        biases: list[NDArray[Any] | None],
        activations: list[str],
        normalise: bool,
    ) -> None: ...
    @property
    def features(self) -> int: ...
    def run(self, pool: Pool, isa: str, pooled: NDArray[Any], out: NDArray[Any]) -> None: ...
