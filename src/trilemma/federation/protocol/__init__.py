"""What travels between parties, and the public rules by which it counts."""
