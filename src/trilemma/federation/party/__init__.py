"""A party's folder: what is in it, how it comes there, and what is learned from it."""
