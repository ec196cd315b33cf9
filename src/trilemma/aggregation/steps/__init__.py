"""What a rule and a mixing step are, how they are named, chained and carried out."""
