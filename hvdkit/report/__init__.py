"""What people read."""

import logging

# If the home folder cannot be written, matplotlib logs two long lines each time, and works without it.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
