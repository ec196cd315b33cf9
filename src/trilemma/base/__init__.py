"""What everything stands on: errors, keys, names, options, records, files."""
