"""What the Makefile and the site run."""
