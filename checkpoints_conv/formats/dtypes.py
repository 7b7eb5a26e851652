"""The dtypes that are converted, by the names that safetensors and torch give them."""

import enum


class Dtype(enum.Enum):
    """Safetensors' name; the value is torch's.  Planning and copying need no torch, whose import takes seconds."""

    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"

    @property
    def bytes(self) -> int:
        """Size of one element."""
        return 4 if self is Dtype.F32 else 2

    def __str__(self) -> str:
        return self.value


NAMES = ", ".join(dtype.name for dtype in Dtype)
