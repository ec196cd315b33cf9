"""The kinds of blocks that server and client exchange, with their typed fields; `wire` carries them."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from trilemma.federation.protocol.expulsions import AnnouncedExpulsion

Count = Annotated[int, Field(ge=0, lt=1 << 31)]
"""The number of an epoch, a round or a client: from 0, and within what everybody's files can hold."""


class Header(BaseModel):
    """The typed fields of a block. Unknown fields and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    kind: ClassVar[str]


class Hello(Header):
    """Server → client: a run's epoch begins; who are you? `terms` is what both must have agreed on.

    `roster` is the one in force, as its authority signed it; `expelled` are all who were expelled so far.
    """

    kind = "hello"
    run: str
    epoch: Count
    terms: str
    roster: str = ""
    expelled: list[AnnouncedExpulsion] = Field(default_factory=list)


class Joined(Header):
    """Client → server: this is me, and this is my signed key for the epoch."""

    kind = "joined"
    client: Count
    run: str
    epoch: Count
    key: str


class Keys(Header):
    """Server → client: the signed keys of everybody in the epoch, relayed."""

    kind = "keys"
    run: str
    epoch: Count
    keys: dict[str, str]


class Ready(Header):
    """Client → server: every key was signed by who it should be; my signature under the list of members."""

    kind = "ready"
    client: Count
    run: str
    epoch: Count
    confirmation: str


class Confirm(Header):
    """Server → client: the signatures of everybody in the epoch under its list, relayed."""

    kind = "confirm"
    run: str
    epoch: Count
    confirmations: dict[str, str]


class Confirmed(Header):
    """Client → server: every member signed the list I have; I will answer in this epoch."""

    kind = "confirmed"
    client: Count
    run: str
    epoch: Count


class Doubted(Header):
    """Client → server: not with these, whose ledgers went back; what they signed before shows it."""

    kind = "doubted"
    client: Count
    run: str
    epoch: Count
    shown: dict[str, str]


class Ask(Header):
    """Server → client: take a step of round `round`; the broadcast is in the tensors.

    `heard` says in which round each client's answer was last used: steps after it did not happen. `unused`
    are the clients whose answer was not used when they were last asked.
    """

    kind = "ask"
    run: str
    epoch: Count
    round: Count
    heard: dict[str, int]
    unused: list[int]


class Answer(Header):
    """Client → server: the message of a round, as its layout says: a vector, or encoded bytes."""

    kind = "answer"
    client: Count
    run: str
    epoch: Count
    round: Count


class Inquire(Header):
    """Server → client: what the server asks once it has heard the answers of a round, in the tensors."""

    kind = "inquire"
    run: str
    epoch: Count
    round: Count


class Detail(Answer):
    """Client → server: the reply to an `Inquire`, as its layout says."""

    kind = "detail"


class Evaluate(Header):
    """Server → client: how good is the model in the tensors, which round `round` led to, on your examples?"""

    kind = "evaluate"
    run: str
    epoch: Count
    round: Count


class Scored(Answer):
    """Client → server: its share of right answers, with its noise, in the tensors."""

    kind = "scored"


class Finished(Header):
    """Server → client: the run is over; its result is in the tensors."""

    kind = "finished"
    run: str


class Expelled(Header):
    """Server → client: you were expelled from the run, and this is why."""

    kind = "expelled"
    run: str
    expulsion: AnnouncedExpulsion


class Noted(Header):
    """Client → server: understood."""

    kind = "noted"
    client: Count
    run: str
