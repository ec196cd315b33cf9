"""Flower as the carrier of a federation: `trilemma.federation` over a SuperLink and SuperNodes.

* `client_app`, `server_app`, `records`: the two apps and what a message holds.
* `worker`, `supernode`, `superlink`: the processes that run and carry them; `host`: which forks many.
* `bell`: how one process of a party lets another know that there is work.
* `guard`, `handshake`, `lines`, `limits`, `heads`, `announcements`, `replies`, `meters`, `waiting`,
  `lost_answers`, `presence`: the server's door, what may pass it, who waits, what is lost, what it sees.
* `telling`, `metrics`, `short_logs`: who hears what happens in a worker; no process's log grows for ever.
* `internals`, `supernode_internals`, `superlink_internals`: what leans on parts of Flower that are not
  public, with the reasons.
* `deployment`, `control`, `files`: bringing parties up and down, talking to the SuperLink.

Flower is an optional extra (`pip install trilemma[flower]`); nothing outside this room imports it.
`deployment` and `files` do without: a federation can be looked at, and taken down, where Flower is missing.
"""

POLL = "TRILEMMA_POLL"
"""Environment variable of a party's processes: seconds between two looks.

It is here because a SuperNode reads it, which hands blocks on and need not import torch to do so.
"""

CERTIFICATE, CERTIFICATE_KEY = "TRILEMMA_CERTIFICATE", "TRILEMMA_CERTIFICATE_KEY"
"""Environment variables of a SuperNode: files with what it shows at the server's door."""

SILENCE = "TRILEMMA_SILENCE"
"""Environment variable of a SuperNode: seconds without asking for work after which it starts itself anew."""

BELL = "TRILEMMA_BELL"
"""Environment variable of a party's processes: the file by which one tells another that there is work."""

REST = "TRILEMMA_REST"
"""Environment variable of a client's worker: seconds without a task after which it starts itself anew."""
