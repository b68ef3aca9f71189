"""What `hvdkit` and `python -m hvdkit` start."""

import gc
import signal


def main() -> None:
    """The command line. While it is being loaded, Ctrl-C ends the process without a word, not with a traceback."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup and the like ignore it
    if heeds:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # nothing that is being loaded can be freed; looking for it takes a tenth of the start
    from hvdkit.cli import main as command_line

    gc.freeze()
    gc.enable()
    if heeds:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line()


if __name__ == "__main__":
    main()
