"""Objects in folders and object stores (`Storage`): read by ranges, written whole, listed by prefix."""
