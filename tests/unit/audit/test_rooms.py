"""The audit runs where neither torch nor grpc is installed."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import edl_torch.audit.log, edl_torch.audit.verdict, edl_torch.cli.audit
rooms = ("torch", "grpc", "cv2", "edl_torch.client", "edl_torch.rpc", "edl_torch.master", "edl_torch.data")
print([room for room in rooms if room in sys.modules])
"""


def test_the_audit_needs_only_errors_nouns_and_core():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
