"""``[compression]``: the codec of what agents send."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from nufed.algorithms.compression import CODECS, Codec, TopK


class CompressionConfig(BaseModel):
    """``[compression]``: of what agents send, the same in simulation and in a federation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    codec: Literal["off", "bfloat16", "int8", "top_k"] = Field(
        default="off",
        description="of each number's change: off | bfloat16 | int8 | top_k, the last two with "
        "error feedback",
    )
    share: float = Field(default=0.01, gt=0, le=1, description="of the numbers that top_k sends")

    def make(self) -> Codec | None:
        """The codec; None: nothing is compressed."""
        if self.codec == "off":
            return None
        return TopK(self.share) if self.codec == "top_k" else CODECS[self.codec]()
