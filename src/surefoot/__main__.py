"""`python -m surefoot` is `surefoot`."""

import sys

from surefoot.cli import main

sys.exit(main())
