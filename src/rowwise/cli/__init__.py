"""The `rowwise` command: a thin skin on the library, one file a command."""
