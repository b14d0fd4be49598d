"""Kernels of the row-wise operations between the linear layers: each row on its own, in a fixed order.

Sums along a row keep `LANES` partial sums, combined in one fixed order, so that no bit depends on how the
work is cut into threads.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from model.cpu.jit import ALONE, F32, LANES, combine, exp, kernel, parallel_kernel


@kernel
def inverse_rms(x: F32, eps: np.float32, lanes: F32) -> np.float32:
    """1 / sqrt(mean(x**2) + eps); lanes: [LANES], scratch."""
    lanes[:] = 0
    whole = len(x) // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] += x[i + j] * x[i + j]
    for j in range(len(x) - whole):
        lanes[j] += x[whole + j] * x[whole + j]
    return np.float32(1.0) / np.sqrt(combine(lanes) / np.float32(len(x)) + eps)


@kernel
def _add_rms_norm_row(x: F32, delta: F32, weight: F32, eps: np.float32, out: F32) -> None:
    for i in range(len(x)):
        x[i] += delta[i]
    scale = inverse_rms(x, eps, np.empty(LANES, np.float32))
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@parallel_kernel
def add_rms_norm(x: F32, delta: F32, weight: F32, eps: np.float32, out: F32) -> None:
    """x += delta; out = x / rms(x) * weight, row by row. x, delta, out: [rows, width]."""
    if x.size <= ALONE:
        for row in range(len(x)):
            _add_rms_norm_row(x[row], delta[row], weight, eps, out[row])
    else:
        for row in prange(len(x)):
            _add_rms_norm_row(x[row], delta[row], weight, eps, out[row])


@kernel
def _silu_mul_row(gate: F32, up: F32, out: F32) -> None:
    for i in range(len(out)):
        out[i] = gate[i] / (np.float32(1.0) + exp(-gate[i])) * up[i]


@parallel_kernel
def silu_mul(gate_up: F32, out: F32) -> None:
    """out = silu(gate) * up. gate_up: [rows, 2 * width], gate first; out: [rows, width]."""
    width = out.shape[1]
    if out.size <= ALONE:
        for row in range(len(out)):
            _silu_mul_row(gate_up[row, :width], gate_up[row, width:], out[row])
    else:
        for row in prange(len(out)):
            _silu_mul_row(gate_up[row, :width], gate_up[row, width:], out[row])
