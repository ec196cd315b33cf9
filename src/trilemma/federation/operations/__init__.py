"""What those who operate a federation do: bring it up, look at it, change its members."""
