"""The row-wise operations between the linear layers; each row on its own."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from model import kernels


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `x` in place and return rms_norm(x) * weight. x, delta: [rows, width]."""
    if x.device.type != "cpu":
        x += delta
        return F.rms_norm(x, weight.shape, weight, eps)
    out = torch.empty_like(x)
    kernels.add_rms_norm(x.numpy(), delta.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [rows, 2 * width], gate first. Returns [rows, width]."""
    if gate_up.device.type != "cpu":
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    kernels.silu_mul(gate_up.numpy(), out.numpy())
    return out
