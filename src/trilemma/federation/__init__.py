"""A real federation: the algorithms of `trilemma.learning` between parties, with keys, crashes and liars.

This room holds no mathematics, and it does not know what carries its messages: `carriers.grpc` is what ships,
`carriers.inprocess` has all parties in one process. A client runs `algorithm.client` on its own data, the
server runs `algorithm.server` on what it admitted, and everything else here is about getting the numbers from
one to the other without losing, repeating, leaking or believing anything:

* `tls_keys`, `certificates`, `public_facts`, `layout`: who holds which secret; one folder per party;
  `agreed`: what all of them must have in common.
* `kinds`, `wire`, `admission`: typed blocks; a reply is admitted or rejected with a reason, and
  so is what a server sends.
* `epochs`, `commits`, `exchange`, `coordinator`: who takes part, what is committed, the server's side;
  `transcript`, `replay`: what a run follows from, and whether it does.
* `sessions`, `spending`, `journal`: a client's keys, budget and memory; `node`, `rounds`: its side of a run.
* `task`: the model and this party's data, perhaps by its own code; `at_home`: what a client takes home.
* `transport`, `carriers`: what a carrier has to do, and two that do it.
* `party_process`, `server_process`, `client_process`: a party is one process; `door`: how its
  operator talks to the server's; `deployment`, `fork_server`, `processes`: who starts and stops them.
* `events`, `logs`, `metrics`: what may be said about all this, once and for all, and where it is written.
* `doctor`, `checks`, `reaching`, `facts`: what is wrong with a party, and what it sees of others.
"""
