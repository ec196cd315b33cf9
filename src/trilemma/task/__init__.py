"""What is trained on what: a model, its loss and metrics, the clients' data; stated once, run anywhere.

* `metrics`: how good outputs are, by name.
"""
