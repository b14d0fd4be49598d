"""numba as all CPU kernels use it: torch's own OpenMP pool, no fast-math, lanes of a fixed width."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import njit

# OpenMP first, and torch's own copy of it: numba asks for the library by another name, would get a second
# one, and two pools of threads would fight for the cores between any two kernels.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
for _library in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
    ctypes.CDLL(str(_library), mode=ctypes.RTLD_GLOBAL)

LANES = 16
"""Floats handled at once; the compiler maps them to what the machine has."""
ALONE = 32_768
"""Floats that one thread handles sooner than a second one wakes up to help."""

# NaN and infinity go through instead of raising: the sampler reports them with the row's number.
kernel: Any = njit(nogil=True, cache=True, error_model="numpy")
parallel_kernel: Any = njit(nogil=True, cache=True, error_model="numpy", parallel=True)

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@kernel
def exp(x: np.float32) -> np.float32:
    """e**x in fp32 to 2 units in the last place; 0 below the normal range, finite above it, NaN for NaN.

    Cody-Waite reduction and the degree-6 minimax polynomial of Cephes' expf, written without
    branches so that loops over it become vector code.
    """
    y = min(max(x, np.float32(-87.3)), np.float32(88.3))
    n = np.rint(y * np.float32(1.44269504))
    r = y - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    if x > np.float32(-87.3):
        return p * power
    return np.float32(0.0) if x <= np.float32(-87.3) else x


@kernel
def combine(lanes: F32) -> np.float32:
    """The sum of LANES partial sums, in one fixed order."""
    step = LANES // 2
    while step > 0:
        for j in range(step):
            lanes[j] += lanes[j + step]
        step //= 2
    return lanes[0]
