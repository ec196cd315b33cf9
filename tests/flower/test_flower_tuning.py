"""What this package changes in Flower's processes, without the processes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from flwr.supernode import start_client_internal

from trilemma.flower import tuning


class State:
    """As much of a SuperNode's memory as sending replies needs."""

    def __init__(self) -> None:
        self.msg_store: dict[str, SimpleNamespace] = {}
        self.lock_msg_store = threading.RLock()

    def store(self, name: str, reply_to: str = "") -> None:
        metadata = SimpleNamespace(message_id=name, reply_to_message_id=reply_to)
        self.msg_store[name] = SimpleNamespace(message=SimpleNamespace(metadata=metadata))


@pytest.fixture
def sending(monkeypatch):
    """The replies that leave, one each time Flower's function is called, as the worker makes them."""
    left: list[str] = []

    def flower(*, state: State, arriving: list[tuple[str, str]]) -> None:
        reply, message = arriving.pop(0)
        left.append(reply)
        state.msg_store.pop(message, None)

    monkeypatch.setattr(start_client_internal, "_push_messages", flower)
    tuning.answer_in_step()
    return left


def test_a_late_reply_to_an_old_message_does_not_stand_for_the_new_one(sending):
    state = State()
    state.store("old")
    state.store("new")
    arriving = [("error", "old"), ("answer", "new"), ("answer to the next", "next")]
    start_client_internal._push_messages(state=state, arriving=arriving)
    assert sending == ["error", "answer"]


def test_one_message_has_one_reply(sending):
    state = State()
    state.store("new")
    state.store("answer", reply_to="new")
    start_client_internal._push_messages(state=state, arriving=[("answer", "new"), ("more", "")])
    assert sending == ["answer"]
