"""Text and sums: how inputs are made, hidden, and counted as good."""

import os

# While a thread waits for the others, it sleeps and does not spin. Beside another busy program a
# spinning thread makes a step twice as slow. This must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
