"""What studies are, what they gave, by which code, and how it compares."""
