from typing import Literal, overload

import torch

@overload
def measure(
    exchange: object, tensors: list[torch.Tensor], scale: float, out: bytearray, whole: Literal[True]
) -> tuple[float, list[int]] | None: ...
@overload
def measure(
    exchange: object, tensors: list[torch.Tensor], scale: float, out: bytearray, whole: Literal[False]
) -> tuple[float, list[int]]: ...
def use(instructions: str) -> list[str]: ...
