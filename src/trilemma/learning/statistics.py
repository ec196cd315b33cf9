"""Private statistics: one round in which every client sends the sum of a bounded vector over its records.

    m_i = (1/b) Σ_j clip(∇ℓ(0; x_j), C) + noise_i              server: R(m_1, …, m_n), and keeps m_1 … m_n

The gradient is that of a survey (`trilemma.survey.layout`): for a task and `columns`, data and model are
replaced so that the gradient of a record *is* its vector of counts and moments (`trilemma.task.surveyed`).
Clipping, noise, accountant, ledger, admission and rule are those of any other algorithm. All records count,
so nothing is sampled; b, the most records that a client counts as holding, is a public constant.

The server keeps the messages in its own state, never in what it hands out: a client that saw the others'
would know more of them than a server does, by the secrets it shares with them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning.messages import Asked, Messages, Parts, one_vector
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, ServerStep, Start, State
from trilemma.learning.settings import AlgorithmSettings, Setup, algorithms
from trilemma.learning.steps.gridded import declared
from trilemma.learning.steps.privatise import client_keys, clip_of, noised
from trilemma.learning.steps.server import aggregate
from trilemma.learning.steps.total import gradients
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.survey.columns import SurveyColumn
from trilemma.survey.layout import Layout


@algorithms.register("statistics")
class PrivateStatistics(AlgorithmSettings):
    """Private statistics of columns: counts, histograms, means, variances, correlations, in one round."""

    rounds: ClassVar[int | None] = 1

    batch_size: int = Field(
        default=100, ge=1, description="records b that a client holds at most (public): it scales the grid"
    )
    columns: dict[str, SurveyColumn] = Field(
        default={},
        description="what is counted of a record, by the column's name: {low, high, bins}, {edges}, "
        "{values}, or {} where bounds are to be found; and missing",
    )
    label: str | None = Field(default=None, description="the column that is to be predicted")
    correlations: bool = Field(default=False, description="also sum the products of all pairs of columns")
    least: int = Field(default=10, ge=0, description="counts below this are not shown")

    @model_validator(mode="after")
    def _about_its_columns(self) -> PrivateStatistics:
        if self.label is not None and self.label not in self.columns:
            raise ValueError(f"label = {self.label!r} is none of the columns: {', '.join(self.columns)}")
        if self.correlations and sum(column.bounded for column in self.columns.values()) < 2:
            raise ValueError("correlations are of two columns with bounds, and there are fewer")
        return self

    @cached_property
    def layout(self) -> Layout:
        """What a record's vector holds."""
        return Layout(self.columns, self.correlations)

    @property
    def fresh_noise(self) -> bool:
        """True: there is one round."""
        return True

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`. Every record takes part, with the public weight 1/b."""
        return Release(clip, NoiseLaw(), unit="example", batch=self.batch_size)

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        release = setup.release
        if setup.scales:
            raise ConfigError(
                "[federation] weights: statistics count records, of whom each counts once; leave them out"
            )

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            params, kept = torch.zeros(model.dim), torch.full((setup.clients, model.dim), torch.nan)
            return Start({"params": params}, {}, {"messages": kept})

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            clip = clip_of(release, setup.grid(clients.model.dim))
            step = gradients(
                clients.model,
                broadcast["params"],
                clients.poisson(1.0, self.batch_size, key.fold("batch")),  # all: each has its place for sure
                # There may be many: unless nothing is noised, they are added up in double precision.
                clip=clip if release is None or release.law.silent else replace(clip, careful=True),
                keys=client_keys(clients, key),
            )
            sent = noised(step.value, setup, clients, round_)
            report = {"loss": step.loss, "clipped": step.clipped}
            return ClientStep(sent.messages(sent.numbers.float()), state, report)

        def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
            value, report = aggregate(setup, messages.vectors, key, messages.geometry)
            kept = state["messages"].clone()
            kept[: len(messages.vectors)] = messages.vectors
            return ServerStep({"params": value}, {"messages": kept}, report)

        message = declared(setup, one_vector("sums"), _sums, columnwise=True)
        return Algorithm(self.called, init, client, server, message, release)


def _sums(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
    return {"sums": fresh}
