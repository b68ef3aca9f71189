"""What people read."""

import logging

# Where the home folder cannot be written, matplotlib says so in two long lines each time, and does without.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
