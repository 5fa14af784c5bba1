"""torch.nn drop-ins.

Knows: torch.nn.RMSNorm, whose arguments, state dict and meaning they share.
Must not: compute anything; the functions do.
"""

from __future__ import annotations

import math

import torch

from .ops import fused_add_rmsnorm, rmsnorm


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm on this package's kernels.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as torch.nn.RMSNorm. A normalized_shape of several
            dimensions is one row. eps=None is float32's epsilon for all dtypes but float64, whatever x is stored in.
        heads: weight of shape (heads, N) for x of shape (…, heads, N), as query and key norms need.
        weight_offset, casting: as in `rmsnorm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        heads: int | None = None,
        weight_offset: float = 0.0,
        casting: str = "fp32",
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # pyright: ignore[reportArgumentType]
        self.heads, self.weight_offset, self.casting = heads, weight_offset, casting
        if heads is not None:
            if len(self.normalized_shape) != 1:
                raise ValueError(f"heads needs a normalized_shape of one dimension, it is {self.normalized_shape}")
            if elementwise_affine:
                self.weight = torch.nn.Parameter(torch.ones(heads, *self.normalized_shape, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, weight = self._rows(x, "x"), self._flat_weight()
        y = rmsnorm(rows, weight, self.eps, weight_offset=self.weight_offset, casting=self.casting)
        return y if rows is x else y.reshape(x.shape)

    def _rows(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x with its normalized dimensions as one row."""
        count = len(self.normalized_shape)
        if tuple(x.shape[-count:]) != tuple(self.normalized_shape):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must end in {tuple(self.normalized_shape)}")
        return x if count == 1 else x.reshape(*x.shape[:-count], math.prod(self.normalized_shape))

    def _flat_weight(self) -> torch.Tensor | None:
        if self.weight is None or len(self.normalized_shape) == 1:
            return self.weight
        return self.weight.reshape(-1)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if self.heads is not None:
            parts.append(f"heads={self.heads}")
        if self.weight_offset:
            parts.append(f"weight_offset={self.weight_offset}")
        if self.casting != "fp32":
            parts.append(f"casting={self.casting!r}")
        return ", ".join(parts)


class FusedAddRMSNorm(RMSNorm):
    """`forward(x, residual, prenorm=True) -> (y, residual_out)`: residual add and norm in one pass. Made as RMSNorm."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, residual: torch.Tensor, prenorm: bool = True
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        rows, added = self._rows(x, "x"), self._rows(residual, "residual")
        y, total = fused_add_rmsnorm(
            rows, added, self._flat_weight(), self.eps, weight_offset=self.weight_offset, casting=self.casting
        )
        if rows is not x:
            y, total = y.reshape(x.shape), total.reshape(x.shape)
        return (y, total) if prenorm else y
