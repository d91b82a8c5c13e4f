"""Newton-Schulz iteration: replaces the singular values of a matrix by values near 1."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "EPS", "STEPS", "flops", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, as in Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024)."""
STEPS = 5
EPS = 1e-7


def orthogonalize(
    matrices: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
) -> Tensor:
    """Approximate U Vᵀ of the singular value decomposition U S Vᵀ, in bfloat16.

    Each step replaces X by a X + (b A + c A²) X with A = X Xᵀ. The coefficients make small singular values grow
    quickly; they end between about 0.7 and 1.2 instead of at 1.

    Args:
        matrices: one of shape (rows, columns), or several of one shape: (matrices, rows, columns). Not changed.
        coefficients: a, b and c.
        steps: number of iterations.
        eps: lower bound of the Frobenius norm that each matrix is divided by.

    Returns:
        A bfloat16 tensor of the same shape. One matrix gives the bits that `torch.optim.Muon` computes of it.
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:  # then X Xᵀ is the smaller product
        x = x.mT
    single = x.dim() == 2
    norm = x.norm() if single else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    multiply_add = torch.addmm if single else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def flops(rows: int, columns: int, steps: int = STEPS) -> int:
    """Floating-point operations of `orthogonalize` for one matrix."""
    short, long = sorted((rows, columns))
    return steps * 2 * short * short * (2 * long + short)
