"""What carries blocks between the server and its clients: each is a `Transport`.

* `inprocess`: every node is an object of this process; for tests and rehearsals.
* `grpc`: one outgoing connection and one stream per client, over mutual TLS; what a federation runs on.
"""
