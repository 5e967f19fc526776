"""Text and sums: how inputs are made, hidden, and counted as good."""

import os

# Let a thread that waits for others sleep instead of spin. Beside another busy program a
# spinning thread makes a step twice as slow. This must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
