"""`hvdkit.submit`, the function that no request declares yet."""

from hvdkit.api.submitting import submit as submit
