"""The commands, a module each: what is asked for, how it is answered, what people read (`request.py`)."""

# All with what `hvdkit --help` says of them, in its order: nothing of a command is imported for that.
COMMANDS = {
    "bench": "Time a collective by size, check each element, and write a cluster file for `hvdkit predict`.",
}
