"""Networks as data: specs, one decoder, one vision tower, families that declare them, and their weights."""
