"""Names shared by the rooms above and below the configuration."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

EngineName: TypeAlias = Literal["direct", "batched", "gram"]

# used as a directory name: no separators, no leading dot
Name = Annotated[str, Field(pattern=r"^[\w][\w.-]*$", max_length=80)]

OWN = "given in Python"  # placeholder in a configuration for an object passed in Python
AT_SITES = "at the sites"  # placeholder for the data of a federation
