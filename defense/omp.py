"""Orthogonal matching pursuit: sparse codes over a dictionary, one greedy atom after the other, many rows at once.

Source: Y. Pati, R. Rezaiifar, P. Krishnaprasad, "Orthogonal matching pursuit: recursive function approximation with
applications to wavelet decomposition", Asilomar 1993. The form with Gram-Schmidt: each chosen atom is made orthogonal
to those before it, so that the residual is updated by one subtraction and no system is solved. Rows and residuals
stay in the space of the data, which is small for patches; the atoms' Gram matrix is never built.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

_ROWS = 512  # rows at once: their correlations with a few hundred atoms stay in the cache
_DEPENDENT = 1e-4  # of an atom's unit length outside the span of the others: less is rounding


@dataclasses.dataclass(frozen=True)
class Code:
    """Sparse codes of P rows.

    Attributes:
        support: (P, k) chosen atoms in the order of choice.
        coefficients: (P, k) their factors; 0 where an atom added nothing, since the row was already matched.
        residual: (P, D) what the code leaves of each row.
    """

    support: Tensor
    coefficients: Tensor
    residual: Tensor

    def dense(self, atoms: int) -> Tensor:
        """(P, atoms) coefficients at the places of their atoms."""
        whole = self.coefficients.new_zeros(len(self.support), atoms)
        return whole.scatter_add_(1, self.support, self.coefficients)


@torch.no_grad()
def residuals(rows: Tensor, atoms: Tensor, nonzeros: int) -> Tensor:
    """(P, D) what the best greedy code of ``nonzeros`` atoms leaves of each row; detached.

    Args:
        rows: (P, D).
        atoms: (A, D), each of unit length, or 0, which is never chosen before others.
        nonzeros: atoms a row, at most A.
    """
    left = torch.empty_like(rows)
    for start in range(0, len(rows), _ROWS):
        left[start : start + _ROWS] = _pursue(rows[start : start + _ROWS], atoms, nonzeros)[0]
    return left


@torch.no_grad()
def code(rows: Tensor, atoms: Tensor, nonzeros: int) -> Code:
    """The codes themselves, for learning a dictionary; arguments as for ``residuals``."""
    found = [_coded(part, atoms, nonzeros) for part in rows.split(_ROWS)]
    return Code(*(torch.cat([getattr(one, name) for one in found]) for name in Code.__dataclass_fields__))


def _pursue(rows: Tensor, atoms: Tensor, nonzeros: int) -> tuple[Tensor, Tensor, Tensor]:
    """Residual (P, D), orthonormal directions (k, P, D), support (k, P)."""
    count, transposed = min(nonzeros, len(atoms)), atoms.T
    basis = rows.new_empty(count, *rows.shape)
    support = torch.empty(count, len(rows), dtype=torch.int64, device=rows.device)
    residual = rows
    for step in range(count):
        support[step] = (residual @ transposed).abs_().argmax(dim=1)
        direction = atoms[support[step]]
        before = basis[:step]
        if step:
            shares = (before * direction).sum(dim=2, keepdim=True)
            direction = direction - (shares * before).sum(dim=0)
        length = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        direction = torch.where(length > _DEPENDENT, direction / length.clamp_min(_DEPENDENT), 0.0)
        basis[step] = direction
        residual = residual - (residual * direction).sum(dim=1, keepdim=True) * direction
    return residual, basis, support


def _coded(rows: Tensor, atoms: Tensor, nonzeros: int) -> Code:
    residual, basis, support = _pursue(rows, atoms, nonzeros)
    basis, support = basis.transpose(0, 1), support.T
    triangle = (basis @ atoms[support].transpose(1, 2)).triu()  # atoms in the orthonormal basis, Gram-Schmidt's R
    unused = torch.diagonal(triangle, dim1=1, dim2=2) == 0.0
    triangle = triangle + torch.diag_embed(unused.to(triangle))
    shares = (basis @ rows.unsqueeze(2)).masked_fill(unused.unsqueeze(2), 0.0)
    return Code(support, torch.linalg.solve_triangular(triangle, shares, upper=True).squeeze(2), residual)
