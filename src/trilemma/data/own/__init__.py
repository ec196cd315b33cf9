"""Your own data: tables, columns, targets, and what a record may be."""
