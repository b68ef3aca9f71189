"""What `hvdkit` and `python -m hvdkit` start. It imports next to nothing before it can answer Ctrl-C."""


def main() -> None:
    """The command line. While it is being loaded, Ctrl-C ends the process without a word, not with a traceback."""
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and the like ignore it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    import gc

    gc.disable()  # nothing that is being loaded can be freed; looking for it takes a tenth of the start
    try:
        from hvdkit.cli.app import main as command_line
    except ImportError as error:
        raise SystemExit(
            f"hvdkit cannot be loaded: {error}; install it anew, in a checkout by `make bootstrap`"
        ) from None
    gc.freeze()
    gc.set_threshold(20_000)  # not 700 objects: a command loads as much again
    gc.enable()
    command_line(own_process=True)


if __name__ == "__main__":
    main()
