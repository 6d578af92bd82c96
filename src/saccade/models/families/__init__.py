"""One module per family; each defines a `FAMILY`."""
