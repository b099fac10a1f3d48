"""When a result counts as right. The tolerance comes from the oracle, never from taste.

``ref64`` is the reference run in float64, ``ref`` the same reference in the tensors' own dtype, of which
``attention.narrow_products`` and ``tensor_cores`` say what it is where that has 8 bits. A float result passes
when ``max|got - ref64| <= 2 * max|ref - ref64| + 4 * eps(dtype) * max|ref64|``, inf and nan stand at the same places
as in ``ref``, and its direction is as close to ``ref64`` as the same bound implies. Everything else is exact.
"""

from __future__ import annotations

import torch


def check(name: str, got: torch.Tensor, ref: torch.Tensor, ref64: torch.Tensor) -> float:
    """Raise AssertionError with the worst position and both values unless ``got`` is right.

    Returns the error as a fraction of the tolerance (0 for exact results).
    """
    if got.shape != ref.shape or got.dtype != ref.dtype:
        raise AssertionError(f"{name}: {got.dtype} {tuple(got.shape)}, expected {ref.dtype} {tuple(ref.shape)}")
    got = got.detach().to(ref.device)
    if not got.dtype.is_floating_point:
        return _exact(name, got, ref)
    g, r, r64 = got.double(), ref.double(), ref64.double()
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        _same(f"{name}: {what.__name__}", what(g), what(r), g, r64)
    finite = torch.isfinite(r)
    if not bool(finite.any()):
        return 0.0
    g, r, r64 = g[finite], r[finite], r64[finite]
    eps = torch.finfo(got.dtype).eps
    bound = 2 * (r - r64).abs().max().item() + 4 * eps * r64.abs().max().item()
    error = (g - r64).abs()
    worst = int(error.argmax())
    if error[worst].item() > bound:
        at = tuple(finite.nonzero()[worst].tolist())
        raise AssertionError(
            f"{name}{list(at)}: got {g[worst]:.9g}, float64 reference {r64[worst]:.9g}; "
            f"error {error[worst]:.3g} is over the tolerance {bound:.3g} ({int((error > bound).sum())} of {g.numel()})"
        )
    lost, allowed = _misalignment(g, r64), 4 * _misalignment(r, r64) + 8 * eps**2
    if lost > allowed:
        raise AssertionError(f"{name}: 1 - cosine is {lost:.3g}, the oracle allows {allowed:.3g}")
    return error[worst].item() / bound if bound else 0.0


def _exact(name: str, got: torch.Tensor, ref: torch.Tensor) -> float:
    _same(name, got, ref, got, ref)
    return 0.0


def _same(name: str, a: torch.Tensor, b: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> None:
    wrong = a != b
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        count = f"{int(wrong.sum())} of {got.numel()} differ"
        raise AssertionError(f"{name}{list(at)}: got {got[at].item()}, expected {want[at].item()} ({count})")


def _misalignment(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - cosine, computed from the difference so that it does not cancel."""
    norm = a.norm() * b.norm()
    if norm == 0:
        return 0.0
    return float(((a / a.norm() - b / b.norm()).square().sum() / 2).item())
