"""Ray actors of a run.

Ray reads these variables when it is imported.  A driver without RAY_ADDRESS starts a cluster of its own, which listens on
loopback only; the variable that does this is named after the systems on which it is Ray's default.
"""

import os

os.environ.setdefault("RAY_AUTH_MODE", "token")
if os.environ.get("RAY_ADDRESS", "") in ("", "local"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
