"""`python -m edl_torch`: the command line."""

import sys

from edl_torch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
