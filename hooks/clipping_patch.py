"""The wrappers around gradient clipping: they tell the norm that it computed anyway.

Clipping may be part of a compiled region that must not break (`fullgraph=True`): there dynamo traces through them as if
they were not there, and the clipping is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling


class ClippingPatch:
    """`total_norm` and `clip` make the two wrappers. Each does nothing once `live` is [False]."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._norm_type = 2.0
        """Of the last total norm: clipping is told the norm, not its type."""

    def total_norm(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Around `get_total_norm`."""

        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling() and live[0]:
                self._norm_type = float(norm_type)
            return original(tensors, norm_type, *args, **kwargs)

        return get_total_norm

    def clip(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Around `clip_grads_with_norm_`."""

        def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not live[0]:
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)
            result = original(parameters, max_norm, total_norm, *args, **kwargs)
            clipped = [parameters] if isinstance(parameters, torch.Tensor) else parameters
            self._tell("clipped", clipped, max_norm, total_norm if self._norm_type == 2.0 else None)
            return result

        return clip_grads_with_norm_
