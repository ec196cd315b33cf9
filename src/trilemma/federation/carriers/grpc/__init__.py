"""The carrier a federation runs on: gRPC, one stream per client, mutual TLS, raw bytes in pieces.

* `frames`: what lies in one message of the stream.
* `transfers`: a block that is sent and a block that arrives, piece by piece.
* `outbox`: what is to be sent on one stream, and in which order.
* `credentials`: who each side is, and how hard the door is.
* `server`, `client`: the two ends.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes a line for every stranger whom it turns away
