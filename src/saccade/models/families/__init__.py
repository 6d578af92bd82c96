"""One module per family; each ends in a `FAMILY`."""
