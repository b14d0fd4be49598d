"""A tensor as its file has it: what a backend packs as it is, and everybody else turns into floats."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType as StoredType

from model.config import ModelError

FLOATS = {
    StoredType.F32: torch.float32,
    StoredType.F16: torch.float16,
    StoredType.BF16: torch.bfloat16,
}
"""The types without blocks; safetensors know no others."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """data: uint8 [*shape[:-1], bytes of the last axis], C order, in the blocks of `type`; often mapped from
    the file, so not to be written to."""

    name: str
    shape: tuple[int, ...]
    type: StoredType
    data: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> StoredTensor:
        """A tensor of one of FLOATS, as it lies in memory."""
        kind = next(kind for kind, dtype in FLOATS.items() if dtype == tensor.dtype)
        data = tensor.contiguous().view(torch.uint8).cpu().numpy()
        return cls(name, tuple(tensor.shape), kind, data)

    def to_float32(self) -> torch.Tensor:
        """Its own copy, dequantised. Raises ModelError for blocks that the gguf package does not know."""
        if self.type in FLOATS:
            return torch.from_numpy(self.data.copy()).view(FLOATS[self.type]).to(torch.float32)
        try:
            return torch.from_numpy(np.array(gguf.quants.dequantize(self.data, self.type), np.float32))
        except NotImplementedError:
            raise ModelError(
                f"tensor {self.name} is quantised as {self.type.name}, which cannot be read here: "
                "use another quantisation, such as Q8_0 or Q4_K"
            ) from None
