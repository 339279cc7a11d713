"""``python -m imagination`` is ``imagine``."""

import sys

from imagination.cli import main

if __name__ == "__main__":
    sys.exit(main())
