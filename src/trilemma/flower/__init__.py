"""Flower as the carrier of a federation: `trilemma.federation` over a SuperLink and SuperNodes.

* `client_app`, `server_app`, `records`: the two apps and what a message holds.
* `worker`, `supernode`, `tuning`: the processes that run them, and what had to be changed in Flower for that.
* `deployment`, `control`, `files`: bringing parties up and down, talking to the SuperLink.

Flower is an optional extra (`pip install trilemma[flower]`); nothing outside this room imports it.
"""
