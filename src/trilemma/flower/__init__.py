"""A real federation: the algorithms of `trilemma.learning` on Flower, with keys, TLS, crashes and liars.

This room holds no mathematics. A client runs `algorithm.client` on its own data, the server runs
`algorithm.server` on what it admitted, and everything else here is about getting the numbers from one to the
other without losing, repeating, leaking or believing anything:

* `certificates`, `layout`: who holds which secret; one folder per party.
* `processes`, `deployment`, `control`: the real processes, started and stopped by process group.
* `wire`, `admission`: typed blocks; a reply is admitted or rejected with a reason.
* `epochs`, `commits`, `coordinator`: who takes part, what the server committed, the server's side of a run.
* `sessions`, `spending`, `journal`, `node`: a client's keys, budget and memory, and its side of a run.
* `task`: the model and this party's data.
* `client_app`, `server_app`, `worker`, `supernode`, `tuning`: the Flower side.

Flower is an optional extra (`pip install trilemma[flower]`); nothing outside this room imports it.
"""
