"""What may be said about what is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trilemma.base.options import Options


class Subspace(Options):
    """A random subspace: θ = θ0 + P z.

    Reference: Li, Farkhoor, Liu, Yosinski, "Measuring the intrinsic dimension of objective landscapes", ICLR
    2018.
    """

    subspace: int = Field(ge=1, description="number of coordinates z")

    def __str__(self) -> str:
        """As a configuration says it."""
        return f"{{subspace = {self.subspace}}}"


class Lora(Options):
    """Low-rank adapters: W + (α/r) B A, with A (r × in) from the key and B (out × r) zero at first.

    Reference: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: low-rank adaptation of large language
    models", ICLR 2022.
    """

    lora: int = Field(ge=1, description="rank r of the adapters")
    on: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None,
        min_length=1,
        description="names or patterns of the linear layers; default: all but the head",
    )
    alpha: float | None = Field(default=None, gt=0, description="α; default: r, so that the factor α/r is 1")
    head: bool = Field(default=True, description="train the head too, unless it has an adapter")

    @property
    def scale(self) -> float:
        """α/r."""
        return 1.0 if self.alpha is None else self.alpha / self.lora

    def __str__(self) -> str:
        """As a configuration says it."""
        where = "" if self.on is None else f", on = {list(self.on)}"
        return f"{{lora = {self.lora}{where}}}"


Train = Literal["all", "head"] | tuple[str, ...] | Subspace | Lora
"""What is trained."""
