"""`python -m saccade` is the command line."""

import sys

from saccade.cli import main

sys.exit(main())
