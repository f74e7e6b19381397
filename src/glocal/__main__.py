"""`python -m glocal`."""

import sys

from glocal.cli.main import main

sys.exit(main())
