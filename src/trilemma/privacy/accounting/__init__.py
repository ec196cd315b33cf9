"""What releases cost, and how much noise an ε needs."""
